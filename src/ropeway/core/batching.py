"""When sequences may board and when they leave. Knows no memory beyond the admission it goes with."""

from __future__ import annotations

from typing import Protocol

from ropeway.core.admission import Admission, OptimisticAdmission, ReserveAdmission
from ropeway.core.params import FinishReason


class Batching(Protocol):
    """What a scheduler asks of a way of batching.

    admission: the memory a sequence needs to board.
    is_padded: finished sequences that are retained are computed on, as padding.
    samples_take_turns: those of one request, beside other requests.
    """

    @property
    def admission(self) -> Admission: ...

    @property
    def is_padded(self) -> bool: ...

    @property
    def samples_take_turns(self) -> bool: ...

    def may_board(self, num_running_before: int, num_tokens_left: int) -> bool:
        """Whether one more may board in this step.

        num_running_before: sequences that ran when it began. num_tokens_left: of its budget.
        """

    def retains(self, reason: FinishReason) -> bool:
        """Whether a sequence that finished for `reason` keeps its blocks and its place until nothing runs any more."""


class ContinuousBatching:
    """Sequences board at any step that has tokens left for them, and leave at the step that finished them."""

    is_padded = False
    samples_take_turns = True

    def __init__(self, admission: Admission | None = None) -> None:
        self.admission: Admission = admission or OptimisticAdmission()

    def may_board(self, num_running_before: int, num_tokens_left: int) -> bool:
        return num_tokens_left > 0

    def retains(self, reason: FinishReason) -> bool:
        return False


class StaticBatching:
    """The baseline: a batch forms from those who wait, and nobody boards until its longest member has ended.

    Each member reserves its prompt + max_tokens, and keeps that and its place when it finishes early. With is_padded
    its last position is computed on until the batch ends, as where a batch is a rectangle; without, it only waits.
    A cancelled or failed member frees its memory at once, but its place stays empty.
    """

    samples_take_turns = False

    def __init__(self, *, is_padded: bool = False) -> None:
        self.admission: Admission = ReserveAdmission()
        self.is_padded = is_padded

    def may_board(self, num_running_before: int, num_tokens_left: int) -> bool:
        return num_running_before == 0

    def retains(self, reason: FinishReason) -> bool:
        return reason in ("stop", "length")
