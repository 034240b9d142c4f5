"""What is known of one request: its counts, times and end. Knows no threads and no text."""

from __future__ import annotations

from dataclasses import dataclass

from ropeway.core.params import FinishReason
from ropeway.errors import RopewayError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """One request, while it is open or when it has ended.

    num_generated_tokens: of all its sequences, counted through a stop string's match. num_cached_tokens: of the prompt,
    found in the prefix cache by its first sequence. finish_reasons: by sequence; None where it goes on.
    error: what it ended with instead of an answer. has_started: it computed. arrival_s, first_scheduled_s,
    first_token_s, end_s: time.monotonic(); None where it did not get so far.
    """

    request_id: str
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    finish_reasons: tuple[FinishReason | None, ...]
    error: RopewayError | None
    has_started: bool
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    end_s: float | None = None

    @property
    def has_failed(self) -> bool:
        """It ended with an error, all of it or one of its sequences."""
        return self.error is not None or "error" in self.finish_reasons
