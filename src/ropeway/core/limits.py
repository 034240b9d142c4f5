"""What a scheduler accepts: its limits, and the refusal of what could never run. Knows no queues."""

from __future__ import annotations

from dataclasses import dataclass

from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request
from ropeway.errors import ConfigError, InvalidRequestError, OverloadedError, RequestTooLargeError


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait to begin; None is no limit.

    max_num_reqs: requests, beside those that a free place in the batch is waiting for. max_num_tokens: their known
    tokens, all together; a prompt that nobody is ahead of may be longer.

    Raises ConfigError for a limit below 1.
    """

    max_num_reqs: int | None = None
    max_num_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, limit in (("max_num_queued_reqs", self.max_num_reqs), ("max_num_queued_tokens", self.max_num_tokens)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} must be at least 1, not {limit}")

    def check(self, num_reqs: int, num_tokens: int, num_places: int, num_new_tokens: int = 0) -> None:
        """Raises OverloadedError, with the numbers, where one more may not wait.

        num_reqs, num_tokens: that wait already. num_places: free in the batch. num_new_tokens: of the newcomer.
        """
        if self.max_num_reqs is not None and num_reqs - num_places >= self.max_num_reqs:
            raise OverloadedError(
                f"the queue is full: {num_reqs} requests wait (max_num_queued_reqs is {self.max_num_reqs}); "
                "try again later"
            )
        if self.max_num_tokens is not None and num_reqs and num_tokens + num_new_tokens > self.max_num_tokens:
            raise OverloadedError(
                f"the queue is full: {num_tokens} tokens wait, and {num_new_tokens} more would exceed the "
                f"{self.max_num_tokens} of max_num_queued_tokens; try again later"
            )


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_seqs: most sequences running at once. max_num_batched_tokens: most tokens of a step.
    max_model_len: most tokens of a sequence, prompt and answer. queue: how much may wait.

    Raises ConfigError for a limit below 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    queue: QueueLimits = QueueLimits()

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")

    def effective_context(self, kv: KVManager) -> int:
        """The most prompt + max_tokens that is accepted: what the pool holds bounds it too."""
        return min(self.max_model_len, kv.num_blocks * kv.block_size)

    def check_fits(self, request: Request, kv: KVManager) -> None:
        """Raises InvalidRequestError for an empty prompt, RequestTooLargeError for what could never fit."""
        num_prompt_tokens = len(request.prompt_token_ids)
        num_tokens = num_prompt_tokens + request.max_tokens
        if not num_prompt_tokens:
            raise InvalidRequestError("the prompt is empty: give at least one token", param="prompt")
        if num_tokens <= self.effective_context(kv):
            return
        limit = f"the context of {self.max_model_len}"
        if num_tokens <= self.max_model_len:
            limit = (
                f"the KV pool of {kv.num_blocks} blocks (it needs {kv.num_blocks_for(num_tokens)} of {kv.block_size})"
            )
        raise RequestTooLargeError(
            f"prompt ({num_prompt_tokens}) + max_tokens ({request.max_tokens}) is {num_tokens} tokens, above {limit}: "
            "shorten the prompt or lower max_tokens",
            param="max_tokens",
        )
