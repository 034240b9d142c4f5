"""How much memory a sequence must be able to get before it may board. Knows no queues and no budgets."""

from __future__ import annotations

from typing import Literal, Protocol

from ropeway.core.kv_manager import KVManager
from ropeway.core.sequence import Sequence
from ropeway.errors import ConfigError

AdmissionName = Literal["predictive", "reserve", "optimistic"]


class Admission(Protocol):
    """What a scheduler asks of an admission. Blocks for `num_slots` tokens are granted when a sequence boards.

    The scheduler asks `may_board` only while others run: alone, whatever was accepted fits.
    """

    def num_slots(self, sequence: Sequence) -> int:
        """Tokens that blocks are granted for at once."""

    def begin_step(self) -> None:
        """A step is about to be planned."""

    def may_board(self, sequence: Sequence, kv: KVManager) -> bool:
        """Whether it may board now; then its `num_slots` can be granted."""

    def on_boarded(self, sequence: Sequence) -> None:
        """It holds its blocks and runs."""

    def on_preempted(self, sequence: Sequence) -> None:
        """It ran, and lost its blocks."""

    def on_finished(self, sequence: Sequence) -> None:
        """It ended, with its finish_reason, wherever it was: its state still says where."""


class OptimisticAdmission:
    """Grant what is known now: the prompt, and what a preempted sequence had generated. The rest comes block by block.

    num_kept_blocks: a watermark left free, so that those who run can grow a little before anybody is preempted.
    """

    def __init__(self, num_kept_blocks: int = 0) -> None:
        if num_kept_blocks < 0:
            raise ConfigError(f"the watermark must be at least 0 blocks, not {num_kept_blocks}")
        self._num_kept_blocks = num_kept_blocks

    def num_slots(self, sequence: Sequence) -> int:
        return sequence.num_tokens

    def begin_step(self) -> None:
        pass

    def may_board(self, sequence: Sequence, kv: KVManager) -> bool:
        return kv.num_blocks_to_take(sequence, sequence.num_tokens) + self._num_kept_blocks <= kv.num_free_blocks

    def on_boarded(self, sequence: Sequence) -> None:
        pass

    def on_preempted(self, sequence: Sequence) -> None:
        pass

    def on_finished(self, sequence: Sequence) -> None:
        pass


class ReserveAdmission:
    """Grant prompt + max_tokens: nobody runs out of memory, and what the answer does not use lies idle."""

    def num_slots(self, sequence: Sequence) -> int:
        return sequence.max_num_tokens

    def begin_step(self) -> None:
        pass

    def may_board(self, sequence: Sequence, kv: KVManager) -> bool:
        return kv.num_blocks_to_take(sequence, sequence.max_num_tokens) <= kv.num_free_blocks

    def on_boarded(self, sequence: Sequence) -> None:
        pass

    def on_preempted(self, sequence: Sequence) -> None:
        pass

    def on_finished(self, sequence: Sequence) -> None:
        pass
