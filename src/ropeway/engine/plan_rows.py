"""What the runner keeps of one step for the next: the rows of a plan, and the batches of rows that decode.

Knows arrays and plans; knows no backend and no storage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropeway.backends.batch import ForwardBatch, Int32Array, Int64Array, LogprobRows, SampleBatch
from ropeway.core.plan import StepPlan


@dataclass(frozen=True, slots=True)
class PlanRows:
    """What does not change while the same sequences are scheduled in the same order, gathered from their slots once.

    token_offsets, table_offsets: of each row in the flat storage. order: 0 .. S, the query_indptr of single tokens.
    logprobs: the rows that ask for log-probabilities, None where none does; num_tops: of each of them.
    """

    sequence_ids: tuple[int, ...]
    slots: Int64Array
    slot_numbers: list[int]  # the same
    token_offsets: Int64Array
    table_offsets: Int64Array
    order: Int32Array
    floats: npt.NDArray[np.float32]
    ints: Int32Array
    seeds: npt.NDArray[np.uint64]
    has_token_lists: bool
    logprobs: LogprobRows | None
    num_tops: list[int]


@dataclass(slots=True)
class DecodeRun:
    """The batches of a step in which every row computed and drew one token, to go on from: its arrays advance in place.

    A call of numpy takes some 8 us where a forward pass has just had all of the caches; making these batches anew takes
    forty.

    drawn: the tokens of the rows, which a step that goes on computes behind kv_lens.
    """

    rows: PlanRows
    forward: ForwardBatch
    sample: SampleBatch
    drawn: Int32Array

    def is_followed_by(self, plan: StepPlan, rows: PlanRows) -> bool:
        return rows is self.rows and is_decode(plan) and list(plan.starts) == self.forward.kv_lens.tolist()

    def advance(self) -> None:
        batch = self.forward
        batch.token_ids[:] = self.drawn
        np.add(batch.positions, 1, out=batch.positions)
        np.add(batch.kv_lens, 1, out=batch.kv_lens)  # the sample batch's too


def is_decode(plan: StepPlan) -> bool:
    """Whether every row computes and draws one token."""
    return plan.layer_slice is None and plan.total_num_tokens == plan.num_rows and all(plan.is_sampled)
