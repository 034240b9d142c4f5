"""What is left of one step whose length is a time, and whether a chunk should take several. Knows no objectives."""

from __future__ import annotations

from dataclasses import dataclass

from ropeway.core.pacing import StepLoad
from ropeway.core.plan import LayerSlice
from ropeway.core.step_time import StepCosts, StepWork, num_pairs

# Of what a step has left, that reading the keys of one more prompt may take. Beside one answer, 7,000 tokens into both
# of two prompts, steps of one token of each took 7 ms a token, of two tokens of one of them 5.
SHARED_READS = 1 / 16
# A wave begins where it gets further than chunks do, by so much for each of its slices: whoever comes next waits for
# its end. A chunk is whole tokens: beside 8 answers, where a step has room for 4 or 5 of them, a tenth of it was left;
# and short chunks share what they read of the past among few (8 answers at 2,500, prompts behind 7,000 tokens: chunks
# of 4 went at 0.81 of the speed that 256 have alone, 16 in 4 slices at 0.92, 40 in 10 at 1.01).
WAVE_GAIN_PER_SLICE = 0.03
# Whoever arrives waits for the end of a wave. Beside one answer, 7,000 tokens into a prompt, 10 steps hold nine tenths
# of the tokens that as many of 30 slices would.
MAX_NUM_SLICES = 10
NEAR_BEST = 0.9  # of the tokens per step that the best number of slices holds: fewer slices are over sooner


@dataclass(frozen=True, slots=True)
class StepRoom:
    """What a step has for prompts.

    left_s: beside its decodes, saved_s of it from steps before. num_tokens: beside them. num_places: in the batch.
    num_layers: of the model; 1 where a chunk is not to be sliced.
    """

    left_s: float
    saved_s: float
    num_tokens: int
    num_places: int
    num_layers: int


class TimeBudget:
    """What is left of one step: seconds by the costs of now, and tokens.

    is_short: not one token fitted for the first who asked. Then nobody else gets any: nobody overtakes.
    """

    def __init__(self, costs: StepCosts, load: StepLoad, room: StepRoom) -> None:
        self._costs = costs
        self._room = room
        self._left_s = room.left_s
        self._num_tokens_left = room.num_tokens
        self._num_decodes = load.num_rows
        self._num_tokens: float = float(load.num_rows)
        self._may_begin_wave = room.num_layers > 1 and load.num_rows > 0
        self.is_short = False
        self._num_pairs: float = float(load.num_context_tokens)
        self._num_reads: float = float(load.num_context_tokens)
        self._num_rows = load.num_rows
        self.max_num_running = room.num_places

    @property
    def work(self) -> StepWork:
        """What the step holds by now."""
        return StepWork(self._num_tokens, self._num_pairs, self._num_rows, self._num_reads)

    def num_prefill_tokens(self, start: int, *, is_more: bool = False) -> int:
        if self.is_short:
            return 0
        num_tokens = self._costs.num_chunk_tokens(self.work, start, self._left_s - self._costs.row_s, is_more=is_more)
        if not self._num_tokens:
            num_tokens = max(1, num_tokens)  # a step holds something, however long it takes
        elif not num_tokens and self._num_tokens == self._num_decodes:
            self.is_short = True
        return min(num_tokens, self._num_tokens_left)

    def wave(self, start: int, num_tokens: int) -> tuple[int, int] | None:
        if not self._may_begin_wave:
            return None
        step_s = min(self._left_s, self._room.left_s - self._room.saved_s)  # in each of the steps
        num_now = self._num_fitting(start, step_s)
        if num_now >= num_tokens or (num_now and self.is_worth_sharing(start)):
            return None
        most, num_layers = min(num_tokens, self._num_tokens_left), self._room.num_layers
        fitting = [  # so that the largest slice fits
            (min(most, self._num_fitting(start, step_s * num_layers / -(-num_layers // num_slices))), num_slices)
            for num_slices in range(2, min(num_layers, MAX_NUM_SLICES) + 1)
        ]
        worthwhile = [
            (count, slices)
            for count, slices in fitting
            if count and count >= (1 + WAVE_GAIN_PER_SLICE * slices) * num_now * slices
        ]
        if not worthwhile:
            self._may_begin_wave = num_now > 0  # nobody overtakes one who gets nothing
            return None
        best = max(count / slices for count, slices in worthwhile)
        return next((count, slices) for count, slices in worthwhile if count / slices >= NEAR_BEST * best)

    def take_slice(self, start: int, num_tokens: int, layer_slice: LayerSlice, is_sampled: bool) -> bool:
        if num_tokens > self._num_tokens_left:
            return False
        share = layer_slice.share(self._room.num_layers)
        self._add(start, num_tokens, start + num_tokens, is_sampled, share=share)
        self._may_begin_wave = self.is_short = False
        return True

    def _num_fitting(self, start: int, seconds: float) -> int:
        """Tokens behind `start` that add at most so many seconds to the decodes."""
        return self._costs.num_chunk_tokens(self.work, start, seconds - self._costs.row_s)

    def is_worth_sharing(self, start: int) -> bool:
        return self._costs.read_s * start <= self._left_s * SHARED_READS

    def add_prefill(self, start: int, num_tokens: int, is_sampled: bool, *, is_more: bool = False) -> None:
        self._add(start, num_tokens, num_tokens if is_more else start + num_tokens, is_sampled)

    def _add(self, start: int, num_tokens: int, num_reads: int, is_sampled: bool, *, share: float = 1) -> None:
        """num_tokens behind `start`, in a share of the layers, are in the step."""
        before_s = self._costs.seconds(self.work)
        self._num_tokens += share * num_tokens
        self._num_pairs += share * num_pairs(start, num_tokens)
        self._num_reads += share * num_reads
        self._num_rows += is_sampled
        self._num_tokens_left -= num_tokens
        self._left_s -= self._costs.seconds(self.work) - before_s
