"""Which sequences compute how many tokens in the next step, and what became of the last.

Knows no token values beyond the ids that end a sequence, no arrays, clock, text or threads. The same calls with the
same times make the same plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

from ropeway.core.batching import Batching, ContinuousBatching
from ropeway.core.boarding import Boarding
from ropeway.core.deadlines import Deadlines
from ropeway.core.kv_manager import KVManager
from ropeway.core.limits import QueueLimits, SchedulerLimits
from ropeway.core.pacing import Ahead, FixedTokenBudget, Pacing, StepLoad
from ropeway.core.params import MAX_COUNT, FinishReason, Request
from ropeway.core.plan import SequenceEvent, StepPlan, StepResult, TokenLogprobs
from ropeway.core.plan_builder import PlanBuilder
from ropeway.core.preemption import Preemption
from ropeway.core.roster import Roster
from ropeway.core.sequence import Sequence, SequenceState
from ropeway.core.stats import EngineStats, SequenceProgress
from ropeway.core.waiting_line import WaitingLine

__all__ = ["Scheduler", "SchedulerLimits"]


class Scheduler:
    """One step is `plan` → (the runner computes it) → `commit`, or `fail` where it could not be computed.

    One plan is in flight at a time; `add`, `abort` and `stop` may come at any moment, also while one is.
    now_s, everywhere: seconds on one clock that never goes back.

    line: who waits, under which policy. batching: when they board, with which memory. pacing: how much a step holds.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVManager,
        *,
        line: WaitingLine | None = None,
        batching: Batching | None = None,
        pacing: Pacing | None = None,
    ) -> None:
        self._limits = limits
        self._kv = kv
        self._line = WaitingLine() if line is None else line
        self._batching = batching or ContinuousBatching()
        self._pacing = pacing or FixedTokenBudget(limits.max_num_batched_tokens)
        self._roster = Roster(self._line, kv, self._batching.admission)

        self._preemption = Preemption(self._roster, self._line, kv, self._batching)
        self._boarding = Boarding(self._roster, self._line, kv, self._batching)
        self._deadlines = Deadlines()

        self._in_flight: StepPlan | None = None
        self._planned_s = self._committed_s = 0.0
        self._num_running_planned = 0  # when the last plan was made
        self._prefilled: list[Sequence] = []  # in the step in flight
        self._sampled: list[Sequence] = []  # of the rows in flight, in order
        self._num_steps = 0
        self._num_failed_steps = 0
        self._num_recomputed_tokens = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_padding_tokens = 0
        self._num_timeouts = 0

    @property
    def max_model_len(self) -> int:
        """The effective context: the most prompt + max_tokens that is accepted. What the pool holds bounds it too."""
        return self._limits.effective_context(self._kv)

    @property
    def queue_limits(self) -> QueueLimits:
        """How much may wait to begin."""
        return self._limits.queue

    @property
    def num_running(self) -> int:
        """Sequences that hold memory and have not ended."""
        return len(self._roster.running)

    @property
    def may_board(self) -> bool:
        """Whether a sequence that arrived now would find a place, and nobody before it in line."""
        num_running = len(self._roster.running)
        return not len(self._line) and num_running < self._max_num_running and self._batching.may_board(num_running, 1)

    def is_open(self, request_id: str) -> bool:
        """Whether a request has an unfinished sequence."""
        return self._roster.is_open(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished; then `plan` has something to compute."""
        return bool(self._roster.sequences)

    def add(self, request: Request, now_s: float) -> tuple[Sequence, ...]:
        """Accept a request: its n sequences, waiting.

        Raises InvalidRequestError for an empty prompt or an id in use, RequestTooLargeError for what could never fit,
        OverloadedError where the queue is full or a latency target could not be met. Background requests are never
        refused for those, and are in nobody's way there: they wait as long as they must, and make way.
        """
        self._limits.check_fits(request, self._kv)
        if not request.terms.is_background:
            self._check_room(request)
        sequences = self._roster.add(request, now_s)
        self._deadlines.add(sequences)
        return sequences

    def expire(self, now_s: float) -> list[SequenceEvent]:
        """End the requests that are out of time, and free their blocks; to be asked before each plan."""
        events: list[SequenceEvent] = []
        for timeout, sequences in self._deadlines.pop_due(now_s):
            events += self._roster.end_all(sequences, "error", timeout)
        self._num_timeouts += len(events)
        return events

    def plan(self, now_s: float) -> StepPlan | None:
        """What to compute next; None when there is nothing to do.

        Decodes come first, then prefill chunks in policy order, of those who run and of those who board.
        """
        assert self._in_flight is None, f"step {self._in_flight.step_id} is neither committed nor failed"
        roster = self._roster
        if not roster.sequences:
            return None
        roster.begin_step()
        if roster.turns.num_kept:
            self._take_turns(now_s)
        self._line.begin_step(now_s)
        max_num_running, num_running_before = self._max_num_running, len(roster.running)
        self._batching.admission.begin_step()
        self._preemption.make_room(now_s)
        self._preemption.make_way(max_num_running, self._pacing.num_places, now_s)
        builder = PlanBuilder(self._kv.num_groups)
        builder.add_decodes(*roster.decodes.rows())
        self._line.on_planned()
        padding = roster.retained.values() if self._batching.is_padded else ()
        for sequence in padding:
            builder.add_padding(sequence)
        self._sampled = [*roster.decodes.sequences.values(), *padding]
        if roster.prefilling or len(self._line):
            builder.begin_prefills(self._pacing.begin_step(self._load(builder, now_s), now_s))
            self._prefilled = self._boarding.plan_prefills(builder, max_num_running, num_running_before)
            self._sampled += [s for s in self._prefilled if s.num_computed_tokens == s.num_tokens]
        else:  # what was planned of prompts is computed: the pacing is told, and has nothing to be asked
            self._pacing.begin_step(StepLoad(builder.num_rows, builder.num_context_tokens), now_s)
            self._prefilled, self._boarding.is_crowded = [], False
        return self._launch(builder, now_s)

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[SequenceEvent]:
        """Take in what the step in flight sampled; blocks of those who ended are free for the next plan."""
        assert plan is self._in_flight and result.step_id == plan.step_id, f"step {result.step_id} is not in flight"
        sampled_ids = tuple(compress(plan.sequence_ids, plan.is_sampled))
        if result.failed_sequence_ids:
            sampled_ids = tuple([i for i in sampled_ids if i not in result.failed_sequence_ids])
            self._sampled = [s for s in self._sampled if s.sequence_id not in result.failed_sequence_ids]
        assert result.sequence_ids == sampled_ids and len(result.token_ids) == len(sampled_ids), "not what was planned"
        self._in_flight, self._committed_s = None, now_s
        self._pacing.on_computed(plan, now_s - self._planned_s)
        self._take_prefills(result, now_s)
        prompt_events = [] if result.prompt_logprobs is None else self._prompt_news(result.prompt_logprobs)
        events = self._take_tokens(result, now_s)
        self._num_generation_tokens += len(events)
        return prompt_events + events + self._roster.end_all(self._unfinished(result.failed_sequence_ids), "error")

    def _take_tokens(self, result: StepResult, now_s: float) -> list[SequenceEvent]:
        """Append what was sampled; the news of it. The one loop that runs for every token of every sequence.

        So it does nothing that most tokens do not need, and looks at nothing that can be looked up for all at once.
        """
        roster, shares_blocks = self._roster, self._kv.shares_blocks
        ending_token_ids, stopped_ids, logprobs = roster.ending_token_ids, result.stopped_sequence_ids, result.logprobs
        events: list[SequenceEvent] = []
        for sequence, token_id in zip(self._sampled, result.token_ids, strict=True):
            if sequence.finish_reason is not None:  # ended while the step was in flight, or padding
                continue
            sequence.num_computed_tokens = num_tokens = sequence.num_tokens
            sequence.num_tokens = num_tokens = num_tokens + 1
            if shares_blocks:
                sequence.tail_token_ids.append(token_id)
            reason: FinishReason | None = None
            if num_tokens >= sequence.num_tokens_to_attend or token_id in ending_token_ids or stopped_ids:
                reason = self._attend(sequence, token_id, stopped_ids)
            scores = logprobs and logprobs.get(sequence.sequence_id)
            events.append(
                SequenceEvent(
                    sequence.request_id,
                    sequence.index,
                    (token_id,),
                    reason,
                    sequence.num_cached_tokens,
                    (scores,) if scores else None,
                )
            )
            if reason is not None:
                self._pacing.on_finished(sequence, now_s)
                roster.finish(sequence, reason, is_retained=self._batching.retains(reason))
        return events

    def _attend(self, sequence: Sequence, token_id: int, stopped_ids: tuple[int, ...]) -> FinishReason | None:
        """Do what is due with the token that a sequence just got; why it ends with that, where it does."""
        self._roster.decodes.attend(sequence)
        if sequence.sequence_id in stopped_ids or (token_id in sequence.request.stop_token_ids and sequence.may_stop):
            return "stop"
        return "length" if sequence.num_tokens >= sequence.max_num_tokens else None

    def _take_prefills(self, result: StepResult, now_s: float) -> None:
        """Of those who prefilled: offer to others what can be trusted of it; note first tokens."""
        for sequence in self._prefilled:
            if sequence.finish_reason is not None or sequence.sequence_id in result.failed_sequence_ids:
                continue
            self._kv.publish(sequence)
            if sequence.first_token_s is None and sequence.num_computed_tokens == sequence.num_tokens:
                sequence.first_token_s = now_s
                self._pacing.on_first_token(sequence, now_s)

    def fail(self, plan: StepPlan, now_s: float) -> list[SequenceEvent]:
        """The step in flight could not be computed: every sequence in it ends as `error`, all others go on.

        What the plan told the runner to clear and forget is told again in the next plan.
        """
        assert plan is self._in_flight, f"step {plan.step_id} is not in flight"
        self._in_flight = None
        self._num_failed_steps += 1
        self._roster.announce_again(plan)
        return self._roster.end_all(self._unfinished(plan.sequence_ids), "error")

    def abort(self, request_id: str) -> list[SequenceEvent]:
        """End every unfinished sequence of a request and free its blocks now; nothing for an id not in use."""
        return self._roster.end_all(self._roster.sequences_of(request_id), "abort")

    def stop(self, request_id: str, index: int) -> list[SequenceEvent]:
        """End one sequence as `stop`, because its text ended; nothing where it has ended already."""
        for sequence in self._roster.sequences_of(request_id)[index : index + 1]:
            if sequence.finish_reason is None:
                is_retained = self._batching.retains("stop") and sequence.num_generated_tokens > 0
                if is_retained and self._in_flight:
                    sequence.num_computed_tokens = sequence.num_tokens  # its row is computed, though nobody takes it in
                if sequence.num_generated_tokens:
                    self._pacing.on_finished(sequence, self._committed_s)
                self._roster.finish(sequence, "stop", is_retained=is_retained)
                return [SequenceEvent(request_id, index, (), "stop")]
        return []

    def take_started_ids(self) -> list[str]:
        """The requests that boarded for the first time in the plan made last, once."""
        return self._roster.take_started_ids()

    def progress(self, request_id: str) -> tuple[SequenceProgress, ...]:
        """Where each sequence of a request is; empty for an id not in use."""
        waits = (SequenceState.WAITING, SequenceState.PREEMPTED)
        return tuple(
            [
                SequenceProgress(
                    index=s.index,
                    state=s.state.value,
                    waiting_reason=s.waiting_reason.value if s.state in waits else None,
                )
                for s in self._roster.sequences_of(request_id)
            ]
        )

    def stats(self) -> EngineStats:
        """Gauges of now, and counters since the start."""
        roster = self._roster
        num_blocks, num_free_blocks = self._kv.num_blocks, self._kv.num_free_blocks
        return EngineStats(
            num_running=len(roster.running),
            num_waiting=len(self._line) + roster.turns.num_kept - roster.num_preempted,
            num_preempted=roster.num_preempted,
            num_blocks=num_blocks,
            num_free_blocks=num_free_blocks,
            num_used_blocks=num_blocks - num_free_blocks,
            num_preemptions=roster.num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_padding_tokens=self._num_padding_tokens,
            num_steps=self._num_steps,
            num_failed_steps=self._num_failed_steps,
            num_prefix_queries=self._kv.num_prefix_queries,
            num_prefix_hits=self._kv.num_prefix_hits,
            num_cached_blocks=self._kv.num_cached_blocks,
            num_evicted_blocks=self._kv.num_evicted_blocks,
            num_finished=dict(roster.num_finished),
            num_timeouts=self._num_timeouts,
            num_places=self._num_places,
            waiting_reason=self._waiting_reason,
            pacing=self._pacing.stats(),
        )

    def _check_room(self, request: Request) -> None:
        roster, num_prompt_tokens = self._roster, len(request.prompt_token_ids)
        num_queued_tokens = roster.num_queued_tokens - roster.num_queued_background_tokens
        num_new_tokens = num_prompt_tokens * request.params.n
        self._limits.queue.check(roster.num_unstarted_interactive, num_queued_tokens, self._num_places, num_new_tokens)
        prefilling = [s for s in roster.prefilling.values() if not s.request.terms.is_background]
        num_decoding = len(roster.running) - roster.num_running_background - len(prefilling)
        ahead = Ahead(num_queued_tokens, _num_left(prefilling), num_decoding)
        self._pacing.check_arrival(num_prompt_tokens, ahead)

    @property
    def _num_places(self) -> int:
        """Free for interactive sequences: background ones make way for them.

        Where the last plan could not have somebody board, no places are but those that were left since.
        """
        roster = self._roster
        num_places = max(0, self._max_num_running - len(roster.running) + roster.num_running_background)
        if self._boarding.is_crowded and len(self._line):
            num_places = min(num_places, max(0, self._num_running_planned - len(roster.running)))
        return num_places

    @property
    def _waiting_reason(self) -> str | None:
        first = self._line.first()
        return None if first is None else first.waiting_reason.value

    @property
    def _max_num_running(self) -> int:
        return min(self._limits.max_num_seqs, self._pacing.max_num_running)

    # -- plan, in order ------------------------------------------------------------------------------------------------

    def _take_turns(self, now_s: float) -> None:
        """Of requests with n > 1, let as many samples join the line as the pacing has room for beside the others.

        All of them where several accounts want places or memory that are scarce: who gets them is for the policy to
        say, and an account of which nobody is in line would lose its share.
        """
        turns, max_num_running = self._roster.turns, self._max_num_running
        is_contended = self._boarding.is_crowded and turns.num_accounts > 1

        def num_extra(num_single: int, num_multiple: int) -> int:
            if is_contended or not self._batching.samples_take_turns:
                return MAX_COUNT
            return self._pacing.num_extra_samples(min(num_single, max_num_running), num_multiple)

        self._roster.join_line(turns.release(num_extra), now_s)

    def _load(self, builder: PlanBuilder, now_s: float) -> StepLoad:
        prefilling = self._roster.prefilling.values()
        num_prefilled_tokens = sum([s.num_computed_tokens for s in prefilling])
        num_background_tokens = self._roster.num_queued_background_tokens
        if self._roster.num_running_background:
            num_background_tokens += _num_left([s for s in prefilling if s.request.terms.is_background])
        first = self._line.first_interactive()
        longest_wait_s = 0.0
        if first is not None and first.first_token_s is None:
            longest_wait_s = now_s - first.joined_s
        num_places = max(0, self._max_num_running - builder.num_rows)
        return StepLoad(
            num_rows=builder.num_rows,
            num_context_tokens=builder.num_context_tokens,
            num_prefilling_tokens=_num_left(prefilling),
            num_queued_tokens=self._roster.num_queued_tokens,
            longest_wait_s=longest_wait_s,
            num_prompts=min(num_places, len(prefilling) + len(self._line)),
            num_prefilled_tokens=num_prefilled_tokens,
            num_background_tokens=num_background_tokens,
        )

    def _launch(self, builder: PlanBuilder, now_s: float) -> StepPlan:
        preempted_ids, finished_ids = self._roster.take_announcements()
        plan = builder.build(self._num_steps, preempted_ids, finished_ids, self._kv.take_copies())
        assert plan.num_rows, "there is work, and none of it can be done"
        self._num_steps += 1
        self._num_prompt_tokens += builder.num_prompt_tokens
        self._num_recomputed_tokens += builder.num_recomputed_tokens
        self._num_padding_tokens += builder.num_padding_tokens
        self._in_flight = plan
        self._planned_s = now_s
        self._num_running_planned = len(self._roster.running)
        return plan

    def _prompt_news(self, scored: dict[int, tuple[TokenLogprobs, ...]]) -> list[SequenceEvent]:
        """Events with the log-probabilities of prompt tokens, for the sequences that have not ended."""
        sequences = self._roster.sequences
        return [
            SequenceEvent(sequences[i].request.request_id, sequences[i].index, (), prompt_logprobs=logprobs)
            for i, logprobs in scored.items()
            if i in sequences
        ]

    # -- checks --------------------------------------------------------------------------------------------------------

    def _unfinished(self, sequence_ids: tuple[int, ...]) -> list[Sequence]:
        sequences = self._roster.sequences
        return [sequences[i] for i in sequence_ids if i in sequences]

    def check_invariants(self) -> None:
        """Check that every sequence is in its one place and every block with its one holder.

        Raises AssertionError with the first violation.
        """
        roster = self._roster
        slack = 0 if self._in_flight else 1
        for sequence in roster.sequences.values():
            assert sequence.num_computed_tokens + slack <= sequence.num_tokens, "computed more tokens than are known"
        roster.check_invariants()
        self._boarding.check_invariants()
        assert len(roster.running) + len(roster.retained) <= self._max_num_running, "more sequences run than may"


def _num_left(prefilling: Iterable[Sequence]) -> int:
    """Tokens yet to be computed before these decode."""
    return sum([s.num_tokens - s.num_computed_tokens for s in prefilling])
