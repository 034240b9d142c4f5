"""Drives an engine through virtual time: requests arrive when they should, a step takes what its plan costs.

The engine and its scheduler are the real ones; only the runner and the clock are scripted. How long an answer will be
is known here and nowhere else: the runner draws a stop token when an answer has reached its length. Knows no text,
arrays or model.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress, count
from typing import Protocol

from ropeway.core.params import FinishReason, Request, SamplingParams, ServiceTerms
from ropeway.core.plan import StepPlan, StepResult
from ropeway.core.scheduler import Scheduler
from ropeway.engine.engine import Engine
from ropeway.errors import OverloadedError
from ropeway.sim.cost_model import CostModel, StepShape

STOP_TOKEN_ID, OTHER_TOKEN_ID = 0, 1
MIN_RETRY_S = 1.0  # until a refused client comes back, as a server's Retry-After has it
_FIRST_TOKEN_ID, _NUM_TOKEN_IDS = 100, 16_384


class Clock(Protocol):
    """What a simulation asks of time."""

    def __call__(self) -> float:
        """Seconds."""

    def wait_until(self, time_s: float) -> None:
        """Let nothing happen until then."""


class VirtualClock:
    """Time that passes only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def wait_until(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class AnswerLengths:
    """How long each answer will be: what a scheduler must not know. The last token of an answer is STOP_TOKEN_ID."""

    def __init__(self) -> None:
        self._num_output_tokens: dict[str, int] = {}
        self._ends: dict[int, int] = {}  # by sequence: tokens it has when its stop token is the next

    def script(self, request_id: str, num_output_tokens: int) -> None:
        """Every answer to this request ends with its `num_output_tokens`th token."""
        self._num_output_tokens[request_id] = num_output_tokens

    def begin(self, sequence_id: int, request: Request) -> None:
        """A sequence was made for a scripted request."""
        num_output_tokens = self._num_output_tokens[request.request_id]
        self._ends[sequence_id] = len(request.prompt_token_ids) + num_output_tokens - 1

    def token_ids(self, plan: StepPlan) -> tuple[int, ...]:
        """What the sampled rows of a plan draw; forgets the sequences that it says have finished."""
        ends = self._ends
        for sequence_id in plan.finished_ids:
            ends.pop(sequence_id, None)
        rows = zip(plan.sequence_ids, plan.starts, plan.num_tokens, strict=True)
        sampled = rows if all(plan.is_sampled) else compress(rows, plan.is_sampled)
        return tuple(
            [
                STOP_TOKEN_ID if start + num_tokens >= ends[sequence_id] else OTHER_TOKEN_ID
                for sequence_id, start, num_tokens in sampled
            ]
        )

    def forget(self, request_id: str) -> None:
        """The request has ended, or was refused."""
        del self._num_output_tokens[request_id]


class ScriptedRunner:
    """A `StepRunner` that computes nothing: a step advances the clock by its cost, answers end at their length.

    noise: standard deviation of the logarithm of a step's time around its cost, drawn from `seed`. slowness: by which
    that is multiplied, at the time of the step.
    """

    def __init__(
        self,
        clock: VirtualClock,
        cost: CostModel,
        lengths: AnswerLengths,
        *,
        noise: float = 0.0,
        seed: int = 0,
        slowness: Callable[[float], float] | None = None,
    ) -> None:
        self._clock = clock
        self._cost = cost
        self._lengths = lengths
        self._noise = noise
        self._slowness = slowness
        self._random = random.Random(seed)
        self._result: StepResult | None = None

    def add(self, sequence_id: int, request: Request, index: int) -> None:
        self._lengths.begin(sequence_id, request)

    def launch(self, plan: StepPlan) -> None:
        assert self._result is None, f"step {plan.step_id} launched before the last result was collected"
        step_s = self._cost.step_s(StepShape.of(plan))
        if self._noise:
            step_s *= self._random.lognormvariate(0.0, self._noise)
        if self._slowness is not None:
            step_s *= self._slowness(self._clock.now_s)
        self._clock.now_s += step_s
        sampled_ids = tuple(compress(plan.sequence_ids, plan.is_sampled))
        self._result = StepResult(plan.step_id, sampled_ids, self._lengths.token_ids(plan))

    def collect(self) -> StepResult:
        result, self._result = self._result, None
        assert result is not None, "nothing was launched"
        return result


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes at arrival_s and whose answers would be num_output_tokens long, were there no max_tokens."""

    arrival_s: float
    request: Request
    num_output_tokens: int


@dataclass(slots=True)
class Passage:
    """What became of an arrival. Times in seconds of virtual time; None where it never came to that.

    finish_reason: of its last answer; None where it was refused at the door, or is not over.
    num_output_tokens: of all its answers, so far. token_times_s: of each, where the simulation keeps them.
    """

    arrival: Arrival
    started_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    num_output_tokens: int = 0
    num_open: int = 0
    finish_reason: FinishReason | None = None
    is_refused: bool = False
    token_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None
        return self.first_token_s - self.arrival.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for an answer of one token."""
        if self.num_output_tokens < 2 or self.first_token_s is None or self.end_s is None:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output_tokens - 1)


FollowUp = Callable[[Passage], Arrival | None]


class SimulationStalledError(Exception):
    """The engine has work, computes nothing, and nothing more will arrive: a scheduler that hangs."""


class Simulation:
    """One engine, its clock and the lengths of its answers, and every request that passes through.

    keeps_token_times: for gaps between tokens; costs memory in proportion to the tokens. turnaround_s: from the end of
    an answer until what its client sends next can reach the engine; one that was refused waits as long as it is told.
    """

    def __init__(
        self,
        engine: Engine,
        lengths: AnswerLengths,
        clock: Clock,
        *,
        keeps_token_times: bool = False,
        turnaround_s: float = 0.0,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.passages: list[Passage] = []
        self._lengths = lengths
        self._keeps_token_times = keeps_token_times
        self._turnaround_s = turnaround_s
        self._open: dict[str, Passage] = {}
        self._pending: list[tuple[float, int, Arrival]] = []
        self._order = count()
        self._follow_up: FollowUp | None = None
        self._num_eventless_steps: int | None = None  # the engine's count at the last step, if that had no events

    def run(
        self,
        arrivals: Iterable[Arrival],
        *,
        follow_up: FollowUp | None = None,
        until_s: float | None = None,
        on_step: Callable[[Simulation], None] | None = None,
    ) -> None:
        """Runs until everything has ended, or until the first step that ends at or after `until_s`.

        arrivals: an open loop. follow_up: what the same client sends next once its request is over (refused, too): a
        closed loop. on_step: called after each step.

        Raises SimulationStalledError where the scheduler hangs.
        """
        self._follow_up = follow_up
        for arrival in arrivals:
            self._expect(arrival)
        clock, engine, pending = self.clock, self.engine, self._pending
        while pending or engine.has_work:
            now_s = clock()
            if until_s is not None and now_s >= until_s:
                return
            if not engine.has_work:
                clock.wait_until(pending[0][0])
                now_s = clock()
            while pending and pending[0][0] <= now_s:
                self._submit(heapq.heappop(pending)[2])
            if engine.has_work:
                self._step(now_s)
                if on_step is not None:
                    on_step(self)

    def _expect(self, arrival: Arrival, not_before_s: float = 0.0) -> None:
        heapq.heappush(self._pending, (max(arrival.arrival_s, not_before_s), next(self._order), arrival))

    def _submit(self, arrival: Arrival) -> None:
        request = arrival.request
        passage = Passage(arrival, num_open=request.params.n)
        self.passages.append(passage)
        self._lengths.script(request.request_id, arrival.num_output_tokens)
        try:
            self.engine.submit(request)
        except OverloadedError as error:
            passage.is_refused = True
            self._end(passage, self.clock(), max(MIN_RETRY_S, error.retry_after_s or 0.0))
            return
        self._open[request.request_id] = passage

    def _step(self, before_s: float) -> None:
        events = self.engine.step()
        now_s = self.clock()
        if events:
            self._num_eventless_steps = None
        else:
            self._check_progress(now_s)
        passages, keeps_token_times = self._open, self._keeps_token_times
        for request_id in self.engine.take_started_ids():
            passages[request_id].started_s = before_s
        for event in events:
            passage = passages[event.request_id]
            if event.token_ids:
                passage.num_output_tokens += 1
                if passage.first_token_s is None:
                    passage.first_token_s = now_s
                if keeps_token_times:
                    passage.token_times_s.append(now_s)
            if event.finish_reason is not None:
                self._take_end(passage, event.finish_reason, now_s)

    def _check_progress(self, now_s: float) -> None:
        """A step without events is a prefill chunk, unless the engine's count of steps stands still."""
        num_steps = self.engine.stats().num_steps
        if num_steps == self._num_eventless_steps:
            if not self._pending:
                raise SimulationStalledError(f"nothing is computed at {now_s:.3f} s, and {len(self._open)} wait")
            self.clock.wait_until(self._pending[0][0])
        self._num_eventless_steps = num_steps

    def abort(self, request_id: str) -> None:
        """The client of an open request leaves."""
        for event in self.engine.abort(request_id):
            assert event.finish_reason is not None
            self._take_end(self._open[request_id], event.finish_reason, self.clock())

    def stop(self, request_id: str, index: int) -> None:
        """The text of one answer of an open request ends."""
        for event in self.engine.stop(request_id, index):
            assert event.finish_reason is not None
            self._take_end(self._open[request_id], event.finish_reason, self.clock())

    @property
    def num_output_tokens(self) -> int:
        """Of all answers, so far."""
        return self.engine.stats().num_generation_tokens

    @property
    def open_ids(self) -> list[str]:
        """The requests that are not over, oldest first."""
        return list(self._open)

    def _take_end(self, passage: Passage, reason: FinishReason, now_s: float) -> None:
        passage.num_open -= 1
        if not passage.num_open:
            passage.finish_reason = reason
            del self._open[passage.arrival.request.request_id]
            self._end(passage, now_s, self._turnaround_s)

    def _end(self, passage: Passage, now_s: float, turnaround_s: float) -> None:
        passage.end_s = now_s
        self._lengths.forget(passage.arrival.request.request_id)
        arrival = self._follow_up(passage) if self._follow_up is not None else None
        if arrival is not None:
            self._expect(arrival, not_before_s=now_s + turnaround_s)


def simulate(
    scheduler: Scheduler,
    cost: CostModel,
    *,
    noise: float = 0.0,
    seed: int = 0,
    keeps_token_times: bool = False,
    turnaround_s: float = 0.0,
    slowness: Callable[[float], float] | None = None,
) -> Simulation:
    """A simulation of this scheduler on a machine of this cost, at time 0."""
    clock, lengths = VirtualClock(), AnswerLengths()
    runner = ScriptedRunner(clock, cost, lengths, noise=noise, seed=seed, slowness=slowness)
    engine = Engine(scheduler, runner, clock)
    return Simulation(engine, lengths, clock, keeps_token_times=keeps_token_times, turnaround_s=turnaround_s)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one request. num_output_tokens: hidden from the scheduler, which sees max_tokens only."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int


def make_arrival(number: int, arrival_s: float, lengths: Lengths, terms: ServiceTerms | None = None) -> Arrival:
    """Request `number`; its prompt, of ids that most vocabularies have, begins like no other's: they share no block."""
    prompt: tuple[int, ...] = (_FIRST_TOKEN_ID + number % _NUM_TOKEN_IDS, _FIRST_TOKEN_ID + number // _NUM_TOKEN_IDS)
    prompt += (_FIRST_TOKEN_ID,) * max(0, lengths.num_prompt_tokens - len(prompt))
    request = Request(
        request_id=str(number),
        prompt_token_ids=prompt[: lengths.num_prompt_tokens],
        params=SamplingParams(max_tokens=lengths.max_tokens),
        max_tokens=lengths.max_tokens,
        seed=0,
        stop_token_ids=frozenset({STOP_TOKEN_ID}),
        terms=terms or ServiceTerms(),
    )
    return Arrival(arrival_s, request, lengths.num_output_tokens)
