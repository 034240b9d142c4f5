"""How much memory a sequence must be able to get before it may run. Knows no queues and no budgets."""

from __future__ import annotations

from typing import Protocol

from ropeway.core.sequence import Sequence
from ropeway.errors import ConfigError


class Admission(Protocol):
    """A sequence is admitted when blocks for `num_slots` tokens can be granted and `num_kept_blocks` stay free.

    They are granted at once. While nothing runs nothing is kept, so whatever fits the pool can run.
    """

    @property
    def num_kept_blocks(self) -> int: ...

    def num_slots(self, sequence: Sequence) -> int: ...


class OptimisticAdmission:
    """Grant what is known now: the prompt, and what a preempted sequence had generated. The rest comes block by block.

    num_kept_blocks: a watermark left free, so that those who run can grow a little before anybody is preempted.
    """

    def __init__(self, num_kept_blocks: int = 0) -> None:
        if num_kept_blocks < 0:
            raise ConfigError(f"the watermark must be at least 0 blocks, not {num_kept_blocks}")
        self._num_kept_blocks = num_kept_blocks

    @property
    def num_kept_blocks(self) -> int:
        return self._num_kept_blocks

    def num_slots(self, sequence: Sequence) -> int:
        return sequence.num_tokens


class ReserveAdmission:
    """Grant prompt + max_tokens: nothing is ever preempted, and what the answer does not use lies idle."""

    @property
    def num_kept_blocks(self) -> int:
        return 0

    def num_slots(self, sequence: Sequence) -> int:
        return sequence.max_num_tokens
