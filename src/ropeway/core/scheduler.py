"""Which sequences compute how many tokens in the next step, and what became of the last.

Owns every sequence from `add` to its one terminal event, the queues, and the counters. Knows no token values beyond the
ids that end a sequence, no arrays, time, text or threads. Same calls in the same order, same plans.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress

from ropeway.core.batching import Batching, ContinuousBatching
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import FinishReason, Request
from ropeway.core.plan import SequenceEvent, StepPlan, StepResult
from ropeway.core.plan_builder import Granted, PlanBuilder
from ropeway.core.policy import FirstComeFirstServed
from ropeway.core.sequence import Sequence, SequenceState
from ropeway.core.stats import EngineStats
from ropeway.errors import ConfigError, InvalidRequestError, RequestTooLargeError


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_seqs: most sequences running at once. max_num_batched_tokens: the token budget of a step.
    max_model_len: most tokens of a sequence, prompt and answer.

    Raises ConfigError for a limit below 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")


class Scheduler:
    """One step is `plan` → (the runner computes it) → `commit`, or `fail` where it could not be computed.

    One plan is in flight at a time; `add`, `abort` and `stop` may come at any moment, also while one is.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        *,
        policy: FirstComeFirstServed | None = None,
        batching: Batching | None = None,
    ) -> None:
        self._kv = kv
        self._policy = policy or FirstComeFirstServed()
        self._batching = batching or ContinuousBatching()
        self._token_budget = limits.max_num_batched_tokens
        # With no more running than a step has tokens, decodes never use up the budget that a prefill waits for.
        self._max_num_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._max_model_len = limits.max_model_len

        self._sequences: dict[int, Sequence] = {}  # unfinished, by sequence id
        self._requests: dict[str, tuple[Sequence, ...]] = {}  # with an unfinished sequence
        self._waiting: list[Sequence] = []  # in policy order
        self._preempted: list[Sequence] = []  # in policy order
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._retained: dict[int, Sequence] = {}  # finished members of a static batch

        self._in_flight: StepPlan | None = None
        self._newly_preempted_ids: list[int] = []
        self._newly_finished_ids: list[int] = []
        self._started_ids: set[str] = set()  # of the requests in use, those that have run
        self._newly_started_ids: list[str] = []

        self._next_sequence_id = 0
        self._num_steps = 0
        self._num_failed_steps = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_padding_tokens = 0
        self._num_finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}

    @property
    def max_model_len(self) -> int:
        """The effective context: the most prompt + max_tokens that is accepted. What the pool holds bounds it too."""
        return min(self._max_model_len, self._kv.num_blocks * self._kv.block_size)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished; then `plan` has something to compute."""
        return bool(self._sequences)

    def add(self, request: Request) -> tuple[Sequence, ...]:
        """Accept a request: its n sequences, waiting.

        Raises InvalidRequestError for an empty prompt or an id in use, RequestTooLargeError for what could never fit.
        """
        self._check_fits(request)
        sequences = tuple(Sequence(self._next_sequence_id + i, request, i) for i in range(request.params.n))
        self._next_sequence_id += len(sequences)
        self._requests[request.request_id] = sequences
        for sequence in sequences:
            self._sequences[sequence.sequence_id] = sequence
            insort(self._waiting, sequence, key=self._policy.key)
        return sequences

    def plan(self) -> StepPlan | None:
        """What to compute next; None when there is nothing to do.

        Decodes come first, then prefill chunks of those who run, in policy order, then those who board.
        """
        assert self._in_flight is None, f"step {self._in_flight.step_id} is neither committed nor failed"
        if not self._sequences:
            return None
        self._newly_started_ids = []
        num_running_before = len(self._running)
        self._make_room()
        builder = PlanBuilder(self._kv.num_groups, self._token_budget)
        prefilling = self._plan_decodes(builder)
        for sequence in self._retained.values() if self._batching.is_padded else ():
            builder.add_padding(sequence)
        for sequence in sorted(prefilling, key=self._policy.key):
            builder.add_prefill(sequence)
        self._board(builder, num_running_before)
        return self._launch(builder)

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceEvent]:
        """Take in what the step in flight sampled; blocks of those who ended are free for the next plan."""
        assert plan is self._in_flight and result.step_id == plan.step_id, f"step {result.step_id} is not in flight"
        sampled_ids = tuple(compress(plan.sequence_ids, plan.is_sampled))
        if result.failed_sequence_ids:
            sampled_ids = tuple([i for i in sampled_ids if i not in result.failed_sequence_ids])
        assert result.sequence_ids == sampled_ids and len(result.token_ids) == len(sampled_ids), "not what was planned"
        self._in_flight = None
        events = []
        for sequence_id, token_id in zip(sampled_ids, result.token_ids, strict=True):
            sequence = self._sequences.get(sequence_id)
            if sequence is None:  # ended while the step was in flight, or padding
                continue
            reason = sequence.append_token(token_id)
            events.append(SequenceEvent(sequence.request.request_id, sequence.index, (token_id,), reason))
            if reason is not None:
                self._finish(sequence, reason)
        self._num_generation_tokens += len(events)
        return events + self._end_all(result.failed_sequence_ids, "error")

    def fail(self, plan: StepPlan) -> list[SequenceEvent]:
        """The step in flight could not be computed: every sequence in it ends as `error`, all others go on.

        What the plan told the runner to clear and forget is told again in the next plan.
        """
        assert plan is self._in_flight, f"step {plan.step_id} is not in flight"
        self._in_flight = None
        self._num_failed_steps += 1
        self._newly_preempted_ids[:0] = plan.preempted_ids
        self._newly_finished_ids[:0] = plan.finished_ids
        return self._end_all(plan.sequence_ids, "error")

    def abort(self, request_id: str) -> list[SequenceEvent]:
        """End every unfinished sequence of a request and free its blocks now; nothing for an id not in use."""
        return self._end_all([s.sequence_id for s in self._requests.get(request_id, ())], "abort")

    def stop(self, request_id: str, index: int) -> list[SequenceEvent]:
        """End one sequence as `stop`, because its text ended; nothing where it has ended already."""
        sequences = self._requests.get(request_id, ())
        return self._end_all([s.sequence_id for s in sequences if s.index == index], "stop")

    def take_started_ids(self) -> list[str]:
        """The requests that boarded for the first time in the plan made last, once."""
        started_ids, self._newly_started_ids = self._newly_started_ids, []
        return started_ids

    def stats(self) -> EngineStats:
        """Gauges of now, and counters since the start."""
        num_blocks, num_free_blocks = self._kv.num_blocks, self._kv.num_free_blocks
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preempted=len(self._preempted),
            num_blocks=num_blocks,
            num_free_blocks=num_free_blocks,
            num_used_blocks=num_blocks - num_free_blocks,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_padding_tokens=self._num_padding_tokens,
            num_steps=self._num_steps,
            num_failed_steps=self._num_failed_steps,
            num_finished=dict(self._num_finished),
        )

    # -- plan, in order ------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Preempt, last admitted first, until each running sequence can have the block its next token needs.

        The first in policy order is spared: alone it always fits, so somebody always finishes. No victim
        boards again in the same plan, because some of the blocks it gave up are needed.
        """
        num_free_blocks = self._kv.num_free_blocks
        if num_free_blocks >= len(self._running):
            return
        num_needed = sum([s.num_tokens > s.num_slots for s in self._running.values()])
        if num_needed <= num_free_blocks:
            return
        first = min(self._running.values(), key=self._policy.key)
        while num_needed > self._kv.num_free_blocks:
            victim = next(s for s in reversed(self._running.values()) if s is not first)
            num_needed -= victim.num_tokens > victim.num_slots
            self._preempt(victim)

    def _plan_decodes(self, builder: PlanBuilder) -> list[Sequence]:
        """Plan one token for each running sequence that decodes; returns those that prefill."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        granted: list[Granted] = []
        for sequence in self._running.values():
            if sequence.num_computed_tokens < sequence.num_prefill_tokens:
                prefilling.append(sequence)
                continue
            if sequence.num_tokens > sequence.num_slots:
                granted.append((len(decoding), self._kv.grant(sequence, 1)))
            decoding.append(sequence)
        builder.add_decodes(decoding, granted)
        return prefilling

    def _board(self, builder: PlanBuilder, num_running_before: int) -> None:
        """Admit the preempted, then the waiting, in policy order; nobody overtakes one that does not fit."""
        admission, kv = self._batching.admission, self._kv
        while len(self._running) < self._max_num_running and (queue := self._preempted or self._waiting):
            if not self._batching.may_board(num_running_before, builder.num_tokens_left):
                return
            sequence = queue[0]
            num_blocks = kv.num_blocks_for(admission.num_slots(sequence))
            num_kept_blocks = admission.num_kept_blocks if self._running else 0
            if num_blocks + num_kept_blocks > kv.num_free_blocks:
                return
            del queue[0]
            kv.grant(sequence, num_blocks)
            sequence.state = SequenceState.RUNNING
            self._running[sequence.sequence_id] = sequence
            if sequence.request.request_id not in self._started_ids:
                self._started_ids.add(sequence.request.request_id)
                self._newly_started_ids.append(sequence.request.request_id)
            builder.add_prefill(sequence)

    def _launch(self, builder: PlanBuilder) -> StepPlan:
        plan = builder.build(self._num_steps, tuple(self._newly_preempted_ids), tuple(self._newly_finished_ids))
        assert plan.num_rows, "there is work, and none of it can be done"
        self._newly_preempted_ids.clear()
        self._newly_finished_ids.clear()
        self._num_steps += 1
        self._num_prompt_tokens += builder.num_prompt_tokens
        self._num_recomputed_tokens += builder.num_recomputed_tokens
        self._num_padding_tokens += builder.num_padding_tokens
        self._in_flight = plan
        return plan

    # -- moves between states ------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence.sequence_id]
        self._kv.free(sequence)
        sequence.num_recompute_tokens = max(sequence.num_recompute_tokens, sequence.num_computed_tokens)
        sequence.num_prefill_tokens = sequence.num_tokens
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.state = SequenceState.PREEMPTED
        insort(self._preempted, sequence, key=self._policy.key)
        self._newly_preempted_ids.append(sequence.sequence_id)
        self._num_preemptions += 1

    def _end_all(self, sequence_ids: Iterable[int], reason: FinishReason) -> list[SequenceEvent]:
        """End those of the sequences that have not ended yet, each with its terminal event."""
        events = []
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                self._finish(sequence, reason)
                events.append(SequenceEvent(sequence.request.request_id, sequence.index, (), reason))
        return events

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence_id, request_id = sequence.sequence_id, sequence.request.request_id
        sequence.finish_reason = reason
        self._num_finished[reason] += 1
        del self._sequences[sequence_id]
        if all([s.finish_reason for s in self._requests[request_id]]):
            del self._requests[request_id]
            self._started_ids.discard(request_id)
        if sequence.state is not SequenceState.RUNNING:
            queue = self._waiting if sequence.state is SequenceState.WAITING else self._preempted
            del queue[bisect_left(queue, self._policy.key(sequence), key=self._policy.key)]
            self._release(sequence)
            return
        del self._running[sequence_id]
        if self._batching.retains(reason) and sequence.num_generated_tokens:
            sequence.state = SequenceState.RETAINED
            self._retained[sequence_id] = sequence
        else:
            self._release(sequence)
        if not self._running:  # the batch is over
            for retained in self._retained.values():
                self._release(retained)
            self._retained.clear()

    def _release(self, sequence: Sequence) -> None:
        self._kv.free(sequence)
        sequence.state = SequenceState.FINISHED
        self._newly_finished_ids.append(sequence.sequence_id)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_fits(self, request: Request) -> None:
        request_id, kv = request.request_id, self._kv
        num_prompt_tokens = len(request.prompt_token_ids)
        num_tokens = num_prompt_tokens + request.max_tokens
        if not num_prompt_tokens:
            raise InvalidRequestError("the prompt is empty: give at least one token", param="prompt")
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id {request_id!r} is in use: choose another", param="request_id")
        if num_tokens <= self.max_model_len:
            return
        limit = f"the context of {self._max_model_len}"
        if num_tokens <= self._max_model_len:
            limit = (
                f"the KV pool of {kv.num_blocks} blocks (it needs {kv.num_blocks_for(num_tokens)} of {kv.block_size})"
            )
        raise RequestTooLargeError(
            f"prompt ({num_prompt_tokens}) + max_tokens ({request.max_tokens}) is {num_tokens} tokens, above {limit}: "
            "shorten the prompt or lower max_tokens",
            param="max_tokens",
        )

    def check_invariants(self) -> None:
        """Check that every sequence is in its one place and every block with its one holder.

        Raises AssertionError with the first violation.
        """
        assert self._started_ids <= self._requests.keys(), "a request that ended counts as started"
        places = {
            SequenceState.WAITING: self._waiting,
            SequenceState.PREEMPTED: self._preempted,
            SequenceState.RUNNING: list(self._running.values()),
            SequenceState.RETAINED: list(self._retained.values()),
        }
        placed = [sequence for place in places.values() for sequence in place]
        assert len({s.sequence_id for s in placed}) == len(placed), "a sequence is in two places"
        for state, place in places.items():
            assert all(s.state is state for s in place), f"a sequence among the {state.value} is not {state.value}"
        for queue in (self._waiting, self._preempted):
            keys = [self._policy.key(s) for s in queue]
            assert keys == sorted(keys), "a queue is out of policy order"
            assert all(not s.num_computed_tokens and not s.num_slots for s in queue), "a queued sequence holds memory"
        unfinished = {s.sequence_id for s in placed if s.finish_reason is None}
        assert unfinished == set(self._sequences), "an unfinished sequence is lost, or a finished one is not gone"
        for sequence in self._sequences.values():
            assert sequence in self._requests.get(sequence.request.request_id, ()), "a sequence without its request"
            slack = 0 if self._in_flight else 1
            assert sequence.num_computed_tokens + slack <= sequence.num_tokens, "computed more tokens than are known"
        assert len(self._running) + len(self._retained) <= self._max_num_running, "more sequences run than may"
        assert not self._retained or self._running, "a batch without running members was not released"
        self._kv.check_invariants([s for s in placed if s.holds_blocks])
