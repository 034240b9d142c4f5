"""Paces steps by the time they will take: the objective, and latency targets that are held or refused at the door.

Knows no queues, memory or policies; what it learns of steps and requests it is told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ropeway.core.pacing import Ahead, StepLoad
from ropeway.core.params import MAX_COUNT
from ropeway.core.plan import StepPlan
from ropeway.core.sequence import Sequence
from ropeway.core.stats import PacingStats
from ropeway.core.steered_factor import SteeredFactor, Tail
from ropeway.core.step_time import StepCosts, StepTimeModel, StepWork
from ropeway.core.time_budget import StepRoom, TimeBudget
from ropeway.core.undisturbed import Undisturbed
from ropeway.errors import ConfigError, OverloadedError

Objective = Literal["balanced", "throughput", "latency"]


@dataclass(frozen=True, slots=True)
class Crowd:
    """How long a step may take where short prompts crowd the line, which are about to decode beside the others.

    factor: times what the decodes of everybody would take. short_factor: as many times as that, up to short_s.
    """

    factor: float
    short_factor: float
    short_s: float

    def limit_s(self, decode_s: float) -> float:
        """Where the decodes of everybody take decode_s."""
        return max(self.factor * decode_s, min(self.short_factor * decode_s, self.short_s))


@dataclass(frozen=True, slots=True)
class Stretch:
    """How far an objective lets a step grow while prompts wait.

    decode_factor: a step is planned to take at most this many times what its decodes alone would. least_s: but may
    always take this long. prefill_s: a step without decodes takes at most this long. tail: steers decode_factor, but
    for what those who are about to decode would take. crowd: where short prompts crowd the line, if that makes a
    difference. sample_share: by so much the samples of others may slow requests with n = 1 beyond what as many requests
    would, which have a sample each; None for no bound.
    """

    decode_factor: float
    least_s: float
    prefill_s: float
    tail: Tail | None = None
    crowd: Crowd | None = None
    sample_share: float | None = None


# balanced: ITL p99 within 2.5 x the undisturbed median, which a look amid prompts finds a little longer. Past 0.2 s a
# step of prompt gains no throughput, and whoever arrives waits for it to end.
STRETCHES: dict[Objective, Stretch] = {
    "balanced": Stretch(
        2.2, 0.0, 0.2, tail=Tail(2.3, start=1.95, least=1.7, most=2.3), crowd=Crowd(3.0, 8.0, 0.25), sample_share=0.04
    ),
    "throughput": Stretch(4.0, 1.0, 1.0),
    "latency": Stretch(1.3, 0.0, 0.1, sample_share=0.04),
}
LEAST_FACTOR = 1.2  # of what is predicted for decodes: and however much less they take undisturbed
# A prompt of so many tokens, or fewer, is about to decode beside the others: a step's length is measured by what it
# will be then. The last tokens of a long one are no crowd: 10 of 650 steps beside 32 answers were longer for them, and
# the p99 2.8 x. Without this a full house stays half empty: 32 clients who ask 128 tokens and take 64 settled at 10
# decoding and 22 waiting, since prompts need more of the time than so few decodes lend them. Of longer ones two under
# way change nothing beside few decodes: next to a single one they would stretch its gaps to 2.6 x. Steps of up to
# 0.25 s instead of 3 x, and the crowd in full from FULL_CROWD = 0.06 instead of 0.25 on, served 32 clients of
# evidence-peers (virtual time, two seeds) 312 instead of 289 tokens/s, with TTFT p50 0.37 instead of 0.75 s and TPOT
# p50 96 instead of 97 ms; TPOT p99 was 172 instead of 130 ms. Short ones too counted only beside others before: since
# one alone does, 2, 4, 8 and 16 such clients wait 94, 101, 121 and 155 instead of 182, 219, 215 and 218 ms for a first
# token (p50, three seeds) at the same TPOT p50 and 1.11, 1.10, 1.03 and 1.01 times the tokens/s; the TPOT p99 is 1.01
# to 1.7 times as high. For 128 clients 3 x is more than 0.25 s, and with less TTFT p50 was 7.5 instead of 1.1 s. The
# share grows with the crowd.
JOINING_TOKENS = 256
FULL_CROWD = 0.06  # of those who decode, joining
MAX_UNDER_WAY, DECODES_PER_PROMPT = 2, 8  # longer prompts exempt beside nobody; and one less for so many decodes
ANSWERS_WINDOW = 32  # answers over which their mean length is taken
MAX_STRETCH = 8.0  # of decodes, for the sake of a TTFT target: prompts get 7/8 of the time then
DOOR_SHARE = 0.8  # of the time, that an arrival may count on for prompts
MAX_GAP_S = 0.1  # between two steps; a longer one was no part of serving
# Of the TPOT target, that a step is planned to take. With at most 0.95 one run of evidence-slo in 90 held 0.935 of its
# windows, with 0.94 0.968, with 0.93 all, at 0.998 of the throughput.
MARGIN, MIN_MARGIN, MAX_MARGIN = 0.92, 0.6, 0.93
MISSED_SHARE = 0.005  # of answers, that the margin is steered to; they come in clusters
MARGIN_GAIN = 0.02
DECODE_SHARE = 0.95  # of a step, that decodes may fill: the rest lets prompts go on, if slowly
# Of the TTFT target, that the expected wait may be on arrival. With 1 the line stood at the target, and of the accepted
# a third missed it; with 0.8 goodput at 1.5 x capacity rose from 0.51 to 0.77 at the same throughput.
REFUSED_SHARE = 0.8
TTFT_SHARE = 0.7  # of the TTFT target, within which the line is to be served
MAX_RETRY_S = 60.0  # that a refused client is told to wait
RATE_WINDOW_S = 10.0  # over which the speed at which the line is served is measured
MIN_EVIDENCE_S = 2.0  # of a line that waited, before its measured speed is believed


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingTargets:
    """max_num_tokens: of a step, whatever they cost. ttft_s, tpot_s: latency targets, None for none.

    Raises ConfigError for a value that is not positive.
    """

    max_num_tokens: int
    objective: Objective = "balanced"
    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_num_tokens < 1:
            raise ConfigError(f"a step must be allowed at least 1 token, not {self.max_num_tokens}")
        for name, value in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if value is not None and not value > 0.0:
                raise ConfigError(f"{name} must be above 0, not {value}")


class TimedPacing:
    """Gives each step as much time as the objective and the targets allow, in the costs of a step as learned so far.

    While sequences decode and prompts wait, a step may take `decode_factor` times what its decodes alone take, or,
    where short prompts crowd the line, more, by what it would take with those decoding too. What does not suffice for
    one token is saved for the next step, so no prompt waits for ever. A TPOT target instead lets every step take it,
    less a margin which is steered so that all but MISSED_SHARE of the answers hold it, and lets nobody board with whom
    the decodes alone would exceed it. A TTFT target stretches steps, within the TPOT target, as far as the line needs
    to be served in time, and refuses at the door what could not be.

    num_layers: of the model, that a chunk can be sliced by.
    """

    def __init__(self, targets: PacingTargets, prior: StepCosts, num_layers: int = 1) -> None:
        self._targets = targets
        # A step of `throughput` is long enough for whole chunks.
        self._num_layers = 1 if targets.objective == "throughput" else num_layers
        self._stretch = STRETCHES[targets.objective]
        self._model = StepTimeModel(prior)
        self._undisturbed = Undisturbed()
        self._steered = None if self._stretch.tail is None else SteeredFactor(self._stretch.tail)
        self._undisturbed_s: float | None = None  # of the decodes of a step that is planned by that, and nothing else
        self._is_in_wave = False
        self._tally = _Tally()
        self._line = _LineRate()
        self._load = StepLoad(0, 0, 0)
        self._num_positions = 0.0  # that a decode attends to, in the mean of the last step that had some
        self._budget: TimeBudget | None = None
        self._begin_s = 0.0
        self._end_s: float | None = None  # of the last step, where it had decodes
        self._gap_s = 0.0  # between two steps
        self._left_s = 0.0  # to prompts, of the last step
        self._saved_s = 0.0  # of steps that had no room for a single token
        self._margin = MARGIN

    @property
    def max_num_running(self) -> int:
        return self._targets.max_num_tokens

    @property
    def num_places(self) -> int:
        return MAX_COUNT if self._budget is None else self._budget.max_num_running

    def num_extra_samples(self, num_single: int, num_multiple: int) -> int:
        """As many as make a step of decodes no longer than (1 + num_multiple / num_single + sample_share) times what it
        would take for the single ones alone: those of several samples get, together, the time of as many others.
        """
        share = self._stretch.sample_share
        if share is None or not num_single or self._targets.tpot_s is not None:
            return MAX_COUNT
        costs = self._model.costs
        num_fixed = costs.fixed_s / max(costs.decode_s(self._num_positions), 1e-12)  # decodes that take as long
        return int(num_multiple / num_single * num_fixed + share * (num_fixed + num_single))

    def check_arrival(self, num_tokens: int, ahead: Ahead) -> None:
        ttft_s = self._targets.ttft_s
        if ttft_s is None:
            return
        num_ahead = ahead.num_queued_tokens + ahead.num_prefilling_tokens
        # What held the line up tells nothing once nobody waits; and would refuse for ever, where nobody may wait.
        measured = self._line.tokens_per_s() if ahead.num_queued_tokens else None
        rate = self._attainable_rate(ahead.num_decoding) if measured is None else measured
        wait_s = (num_ahead + num_tokens) / max(rate, 1e-3)
        limit_s = REFUSED_SHARE * ttft_s
        self._tally.is_overloaded = wait_s > limit_s
        if wait_s > limit_s:
            self._tally.num_refused += 1
            raise OverloadedError(
                f"with {num_ahead} prompt tokens ahead the first token would come in about {wait_s:.1f} s, too late "
                f"for the target of {ttft_s:g} s: try again later",
                retry_after_s=min(wait_s - limit_s, MAX_RETRY_S),
            )

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin_step(self, load: StepLoad, now_s: float) -> TimeBudget:
        if self._end_s is not None and load.num_rows:
            self._gap_s += (min(max(0.0, now_s - self._end_s), MAX_GAP_S) - self._gap_s) / 32
        if load.num_rows:
            self._num_positions = load.num_context_tokens / load.num_rows
        self._left_s = left_s = saved_s = 0.0
        self._undisturbed_s = None
        if load.num_prompts or self._targets.tpot_s is not None:
            left_s, saved_s = self._room_s(load)
        self._begin_s, self._load = now_s, load
        room = StepRoom(
            left_s,
            saved_s=saved_s,
            num_tokens=self._targets.max_num_tokens - load.num_rows,
            num_places=self._num_places_beside(load),
            num_layers=self._num_layers,
        )
        self._budget = TimeBudget(self._model.costs, load, room)
        return self._budget

    def _room_s(self, load: StepLoad) -> tuple[float, float]:
        """Seconds for prompts beside the decodes of a step, and how many of them were saved for it."""
        decode_s = self._model.costs.seconds(_decodes(load))
        limit_s = self._limit_s(load, decode_s)
        is_steered = self._targets.ttft_s is None and limit_s == self._stretched_s(decode_s)
        self._undisturbed_s = self._undisturbed.share * decode_s if is_steered else None
        left_s, saved_s = limit_s, 0.0
        if load.num_rows:
            saved_s = self._saved_s
            left_s = max(0.0, limit_s - decode_s) + saved_s
        if self._is_looking(load):
            self._left_s = saved_s  # what is saved stays so
            return 0.0, 0.0
        self._left_s = left_s
        return left_s, saved_s

    def _is_looking(self, load: StepLoad) -> bool:
        """Whether this step holds decodes alone, though prompts wait, to see what they take."""
        is_measured_by_them = self._targets.tpot_s is None and self._stretch.least_s == 0.0
        return is_measured_by_them and load.num_rows > 0 and not self._is_in_wave and self._undisturbed.is_look_due

    def _limit_s(self, load: StepLoad, decode_s: float) -> float:
        """How long a step with these decodes, which alone take decode_s, may take."""
        stretch, targets = self._stretch, self._targets
        if not load.num_rows:
            return stretch.prefill_s - self._model.costs.fixed_s
        if targets.tpot_s is not None:
            self._tally.is_tpot_out_of_reach = decode_s > targets.tpot_s
            # Where decodes alone take the whole target, prompts still go on, if slowly: else nobody would board.
            return max(self._step_target_s(targets.tpot_s), decode_s / DECODE_SHARE)
        limit_s = self._stretched_s(decode_s)
        num_joining = self._num_joining(load)
        if num_joining:
            everybody_s = self._model.costs.seconds(_decodes(load, num_joining))
            limit_s = max(limit_s, stretch.decode_factor * everybody_s)
            if stretch.crowd is not None:
                share = min(1.0, num_joining / (FULL_CROWD * load.num_rows))
                limit_s += share * max(0.0, stretch.crowd.limit_s(everybody_s) - limit_s)
        if targets.ttft_s is None or not load.num_interactive_tokens:
            return limit_s
        left_s = max(TTFT_SHARE * targets.ttft_s - load.longest_wait_s, 1e-9)
        needed_share = self._model.costs.token_s * load.num_interactive_tokens / left_s
        needed_stretch = 1.0 / (1.0 - needed_share) if needed_share < 1.0 else MAX_STRETCH
        return max(limit_s, decode_s * min(MAX_STRETCH, needed_stretch))

    def _stretched_s(self, decode_s: float) -> float:
        """How long a step may take by the objective, where its decodes alone take decode_s and nobody is to join."""
        factor = self._stretch.decode_factor if self._steered is None else self._steered.value
        return max(max(factor * self._undisturbed.share, LEAST_FACTOR) * decode_s, self._stretch.least_s)

    def _num_joining(self, load: StepLoad) -> int:
        """Prompts that are about to decode beside the others; a long one counts for little."""
        num_joining, num_tokens = load.num_prompts, load.num_prompt_tokens + load.num_prefilled_tokens
        if num_tokens > JOINING_TOKENS * num_joining:
            num_under_way = max(0, MAX_UNDER_WAY - load.num_rows // DECODES_PER_PROMPT)
            num_joining = JOINING_TOKENS * num_joining**2 // num_tokens - num_under_way
        # Where a step completes a prompt or so, no more decode at once than an answer takes steps.
        return int(max(0, min(num_joining, self._tally.mean_num_gaps)))

    def _step_target_s(self, tpot_s: float) -> float:
        return max(MIN_MARGIN / 2 * tpot_s, self._margin * tpot_s - self._gap_s)

    def _num_places_beside(self, load: StepLoad) -> int:
        """How many may run so that a step of their decodes alone leaves a share of the TPOT target to prompts."""
        tpot_s, costs = self._targets.tpot_s, self._model.costs
        if tpot_s is None or not load.num_rows:
            return self._targets.max_num_tokens
        left_s = DECODE_SHARE * self._step_target_s(tpot_s) - costs.fixed_s
        return max(1, int(left_s / max(costs.decode_s(self._num_positions), 1e-12)))

    def on_computed(self, plan: StepPlan, step_s: float) -> None:
        assert self._budget is not None, "a step that was not begun"
        load, work = self._load, self._budget.work
        predicted_s = self._model.observe(work, step_s)
        if load.num_rows:
            self._undisturbed.observe(predicted_s, step_s, is_alone=work.num_tokens == load.num_rows)
        self._is_in_wave = plan.layer_slice is not None and not plan.layer_slice.is_last
        self._tally.predicted_s += predicted_s
        self._tally.achieved_s += step_s
        self._end_s = self._begin_s + step_s if load.num_rows else None
        num_prefilled = work.num_tokens - load.num_rows
        self._saved_s = self._left_s if self._budget.is_short else 0.0
        if load.num_interactive_tokens > num_prefilled:
            self._line.observe(num_prefilled, step_s)
        if load.num_prompt_tokens > num_prefilled > 0 and self._steered is not None and self._undisturbed_s:
            self._steered.observe(step_s / self._undisturbed_s)

    # -- answers -------------------------------------------------------------------------------------------------------

    def on_first_token(self, sequence: Sequence, now_s: float) -> None:
        if sequence.request.terms.is_background:
            return
        self._tally.num_first_tokens += 1
        ttft_s = self._targets.ttft_s
        self._tally.num_in_ttft += ttft_s is None or now_s - sequence.joined_s <= ttft_s

    def on_finished(self, sequence: Sequence, now_s: float) -> None:
        num_gaps = sequence.num_generated_tokens - 1
        self._tally.observe_answer(num_gaps)
        if sequence.first_token_s is None or num_gaps < 1 or sequence.request.terms.is_background:
            return
        self._tally.num_answers += 1
        tpot_s = self._targets.tpot_s
        if tpot_s is None or (now_s - sequence.first_token_s) / num_gaps <= tpot_s:
            self._tally.num_in_tpot += 1
            self._margin = min(MAX_MARGIN, self._margin + MARGIN_GAIN * MISSED_SHARE)
        else:
            self._margin = max(MIN_MARGIN, self._margin - MARGIN_GAIN * (1 - MISSED_SHARE))

    def stats(self) -> PacingStats:
        """What it expects and sees."""
        tally = self._tally
        return PacingStats(
            costs=self._model.costs,
            ttft_s=self._targets.ttft_s,
            tpot_s=self._targets.tpot_s,
            predicted_s=tally.predicted_s,
            achieved_s=tally.achieved_s,
            num_first_tokens=tally.num_first_tokens,
            num_in_ttft=tally.num_in_ttft,
            num_answers=tally.num_answers,
            num_in_tpot=tally.num_in_tpot,
            num_refused=tally.num_refused,
            is_overloaded=tally.is_overloaded,
            is_tpot_out_of_reach=tally.is_tpot_out_of_reach,
        )

    def _attainable_rate(self, num_decoding: int) -> float:
        """Prompt tokens per second that steps with so many decodes, each like those of late, would have room for."""
        costs, tpot_s = self._model.costs, self._targets.tpot_s
        share = DOOR_SHARE
        if tpot_s is not None and num_decoding:
            num_context_tokens = num_decoding * self._num_positions
            decode_s = costs.seconds(StepWork(num_decoding, num_context_tokens, num_decoding, num_context_tokens))
            share = min(share, max(1.0 - decode_s / self._step_target_s(tpot_s), 1.0 - DECODE_SHARE))
        return share / max(costs.token_s, 1e-9)


def _decodes(load: StepLoad, num_joining: int = 0) -> StepWork:
    """The decodes of a step alone, or with so many more that just begin."""
    num_rows = load.num_rows + num_joining
    return StepWork(num_rows, load.num_context_tokens, num_rows, load.num_context_tokens)


class _LineRate:
    """Prompt tokens per second of late steps in which more waited than was computed, whatever held them up: more of
    those that latency targets are for.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_tokens = 0.0

    def observe(self, num_tokens: float, step_s: float) -> None:
        kept = max(0.0, 1.0 - step_s / RATE_WINDOW_S)
        self._seconds = self._seconds * kept + step_s
        self._num_tokens = self._num_tokens * kept + num_tokens

    def tokens_per_s(self) -> float | None:
        """None before enough was seen."""
        return self._num_tokens / self._seconds if self._seconds >= MIN_EVIDENCE_S else None


@dataclass(slots=True)
class _Tally:
    predicted_s: float = 0.0
    achieved_s: float = 0.0
    num_first_tokens: int = 0
    num_in_ttft: int = 0
    num_answers: int = 0
    num_in_tpot: int = 0
    num_refused: int = 0
    is_overloaded: bool = False
    is_tpot_out_of_reach: bool = False
    mean_num_gaps: float = math.inf  # of late answers; before the first nothing bounds them
    num_ended: int = 0

    def observe_answer(self, num_gaps: int) -> None:
        self.num_ended += 1
        if self.num_ended == 1:
            self.mean_num_gaps = float(num_gaps)
        self.mean_num_gaps += (num_gaps - self.mean_num_gaps) / min(self.num_ended, ANSWERS_WINDOW)
