"""Where every sequence is, from its arrival to its one terminal event, and what the runner is yet to be told of it.

Moves sequences between states, with their memory; decides nothing. Knows no budgets and no time.
"""

from __future__ import annotations

from collections.abc import Iterable

from ropeway.core.admission import Admission
from ropeway.core.decodes import Decodes
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import FinishReason, Request, Timeout
from ropeway.core.plan import SequenceEvent, StepPlan
from ropeway.core.sample_turns import SampleTurns
from ropeway.core.sequence import Sequence, SequenceState, WaitingReason
from ropeway.core.waiting_line import WaitingLine
from ropeway.errors import InvalidRequestError


class Roster:
    """Every unfinished sequence, in its one place, and the finished ones that a static batch retains.

    sequences: unfinished, by sequence id. running: in order of boarding; each either in prefilling, in that order too,
    or in decodes. retained: finished members of a static batch. ending_token_ids: that end one of the unfinished, each
    with how many requests it is in.
    """

    def __init__(self, line: WaitingLine, kv: KVManager, admission: Admission) -> None:
        self.line = line
        self.sequences: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.decodes = Decodes(kv)
        self.turns = SampleTurns()
        self.retained: dict[int, Sequence] = {}
        self.preempted_now_ids: set[int] = set()  # since the step being planned began
        self.ending_token_ids: dict[int, int] = {}
        self.num_preempted = 0  # of those in line
        self.num_queued_tokens = 0  # known tokens of those in line
        self.num_queued_background_tokens = 0  # of which background sequences have so many
        self.num_running_background = 0
        self.num_preemptions = 0
        self.num_finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._kv = kv
        self._admission = admission
        self._requests: dict[str, tuple[Sequence, ...]] = {}  # with an unfinished sequence
        self._next_sequence_id = 0
        self._newly_preempted_ids: list[int] = []
        self._newly_finished_ids: list[int] = []
        self._started_ids: set[str] = set()  # of the requests in use, those that have run
        self._num_unstarted_background = 0  # requests that have not
        self._newly_started_ids: list[str] = []

    @property
    def num_unstarted_interactive(self) -> int:
        """Requests none of whose sequences has run, but for background ones."""
        return len(self._requests) - len(self._started_ids) - self._num_unstarted_background

    def sequences_of(self, request_id: str) -> tuple[Sequence, ...]:
        """The sequences of a request in use; empty for others."""
        return self._requests.get(request_id, ())

    # -- moves between states ------------------------------------------------------------------------------------------

    def add(self, request: Request, now_s: float) -> tuple[Sequence, ...]:
        """The n sequences of a new request, waiting: in line, or for their turn to join it.

        Raises InvalidRequestError for an id in use.
        """
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} is in use: choose another", param="request_id"
            )
        first_id = self._next_sequence_id
        sequences = tuple([Sequence(first_id + i, request, i, now_s) for i in range(request.params.n)])
        self._next_sequence_id += len(sequences)
        self._requests[request.request_id] = sequences
        self._num_unstarted_background += request.terms.is_background
        for sequence in sequences:
            self.sequences[sequence.sequence_id] = sequence
        self.join_line(self.turns.add(sequences), now_s)
        for token_id in request.stop_token_ids:
            self.ending_token_ids[token_id] = self.ending_token_ids.get(token_id, 0) + 1
        return sequences

    def begin_step(self) -> None:
        """A plan is being made."""
        self.preempted_now_ids.clear()
        self._newly_started_ids = []

    def join_line(self, sequences: Iterable[Sequence], now_s: float) -> None:
        """Those that arrive, and samples that were kept back from it."""
        for sequence in sequences:
            sequence.joined_s = now_s
            self._count_queued(sequence, 1)
            self.line.push(sequence, now_s)

    def is_open(self, request_id: str) -> bool:
        """Whether a request has an unfinished sequence."""
        return request_id in self._requests

    def board(self) -> Sequence:
        """The first of the line runs, with the blocks that the admission grants it."""
        sequence = self.line.pop()
        self._count_queued(sequence, -1)
        self.num_running_background += sequence.request.terms.is_background
        self._kv.board(sequence, self._admission.num_slots(sequence))
        self.num_preempted -= sequence.state is SequenceState.PREEMPTED
        sequence.state = SequenceState.RUNNING
        sequence.num_tokens_to_attend = 0
        self.running[sequence.sequence_id] = self.prefilling[sequence.sequence_id] = sequence
        self._admission.on_boarded(sequence)
        self.line.on_boarded(sequence)
        request_id = sequence.request.request_id
        if request_id not in self._started_ids:
            self._started_ids.add(request_id)
            self._num_unstarted_background -= sequence.request.terms.is_background
            self._newly_started_ids.append(request_id)
        return sequence

    def has_leader(self, sequence: Sequence) -> bool:
        """Match one that might board; whether one ahead of it is computing the first block that was not found."""
        self._kv.match(sequence, self.sequences_of(sequence.request.request_id))
        leader = self._kv.leader(sequence)
        return leader is not None and self.line.key(leader) < self.line.key(sequence)

    def begin_decoding(self, sequence: Sequence) -> None:
        """All of its known tokens are planned: from the next step on it computes one at a time."""
        del self.prefilling[sequence.sequence_id]
        self.decodes.add(sequence)
        self.line.on_decoding(sequence)

    def preempt(self, sequence: Sequence, reason: WaitingReason, now_s: float) -> None:
        """A running sequence loses its blocks and returns to its place in line."""
        self._leave_batch(sequence)
        self._kv.free(sequence)
        sequence.num_recompute_tokens = max(sequence.num_recompute_tokens, sequence.num_computed_tokens)
        sequence.num_prefill_tokens = sequence.num_tokens
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.state = SequenceState.PREEMPTED
        sequence.waiting_reason = reason
        self._admission.on_preempted(sequence)
        self._count_queued(sequence, 1)
        self.line.push(sequence, now_s)
        self._newly_preempted_ids.append(sequence.sequence_id)
        self.preempted_now_ids.add(sequence.sequence_id)
        self.num_preempted += 1
        self.num_preemptions += 1

    def finish(self, sequence: Sequence, reason: FinishReason, *, is_retained: bool = False) -> None:
        """A sequence ends, wherever it is. Its memory is free at once, unless it is_retained with its batch."""
        sequence_id, request_id = sequence.sequence_id, sequence.request.request_id
        sequence.finish_reason = reason
        self.num_finished[reason] += 1
        self._admission.on_finished(sequence)
        del self.sequences[sequence_id]
        if all([s.finish_reason for s in self._requests[request_id]]):
            del self._requests[request_id]
            self._num_unstarted_background -= (
                sequence.request.terms.is_background and request_id not in self._started_ids
            )
            self._forget_ending(sequence.request)
            self._started_ids.discard(request_id)
        was_kept = self.turns.discard(sequence)
        is_running = sequence.state is SequenceState.RUNNING
        if is_running:
            self._leave_batch(sequence)
        elif not was_kept:
            self.num_preempted -= sequence.state is SequenceState.PREEMPTED
            self._count_queued(sequence, -1)
            self.line.remove(sequence)
        if is_running and is_retained:
            sequence.state = SequenceState.RETAINED
            self.retained[sequence_id] = sequence
        else:
            self._release(sequence)
        if not was_kept:
            self.line.on_finished(sequence)
        if self.retained and not self.running:  # the batch is over
            for retained in self.retained.values():
                self._release(retained)
            self.retained.clear()

    def end_all(
        self, sequences: Iterable[Sequence], reason: FinishReason, timeout: Timeout | None = None
    ) -> list[SequenceEvent]:
        """End those of the sequences that have not ended yet, each with its terminal event."""
        events = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                self.finish(sequence, reason)
                request_id, num_cached_tokens = sequence.request.request_id, sequence.num_cached_tokens
                event = SequenceEvent(request_id, sequence.index, (), reason, num_cached_tokens, timeout=timeout)
                events.append(event)
        return events

    def _leave_batch(self, sequence: Sequence) -> None:
        del self.running[sequence.sequence_id]
        self.num_running_background -= sequence.request.terms.is_background
        if not self.decodes.discard(sequence):
            del self.prefilling[sequence.sequence_id]

    def _forget_ending(self, request: Request) -> None:
        for token_id in request.stop_token_ids:
            self.ending_token_ids[token_id] -= 1
            if not self.ending_token_ids[token_id]:
                del self.ending_token_ids[token_id]

    def _count_queued(self, sequence: Sequence, sign: int) -> None:
        """A sequence joins the line (1) or leaves it (-1)."""
        self.num_queued_tokens += sign * sequence.num_tokens
        self.num_queued_background_tokens += sign * sequence.num_tokens * sequence.request.terms.is_background

    def _release(self, sequence: Sequence) -> None:
        self._kv.free(sequence)
        sequence.state = SequenceState.FINISHED
        self._newly_finished_ids.append(sequence.sequence_id)

    # -- news ----------------------------------------------------------------------------------------------------------

    def take_started_ids(self) -> list[str]:
        """The requests that boarded for the first time since this was asked, once."""
        started_ids, self._newly_started_ids = self._newly_started_ids, []
        return started_ids

    def take_announcements(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(preempted_ids, finished_ids) for the runner, once."""
        news = tuple(self._newly_preempted_ids), tuple(self._newly_finished_ids)
        self._newly_preempted_ids.clear()
        self._newly_finished_ids.clear()
        return news

    def announce_again(self, plan: StepPlan) -> None:
        """The runner may not have obeyed this plan: tell it again."""
        self._newly_preempted_ids[:0] = plan.preempted_ids
        self._newly_finished_ids[:0] = plan.finished_ids

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Check that every sequence is in its one place, in its state, with the memory it should have.

        Raises AssertionError with the first violation.
        """
        sequences = self.sequences.values()
        waiting = [s for s in sequences if s.sequence_id not in self.running]
        for sequence in waiting:
            is_preempted = sequence.state is SequenceState.PREEMPTED
            assert is_preempted or sequence.state is SequenceState.WAITING, f"{sequence.state.value}, and nowhere"
            assert not sequence.num_computed_tokens and not sequence.num_slots, "a waiting sequence holds memory"
            assert bool(sequence.num_preemptions) == is_preempted, "preempted, or not, against its count"
        waiting = [s for s in waiting if not self.turns.is_kept(s)]
        self.line.check_invariants(waiting)
        assert self.num_preempted == sum(s.state is SequenceState.PREEMPTED for s in waiting), "preempted miscounted"
        assert self.num_queued_tokens == sum(s.num_tokens for s in waiting), "tokens in line miscounted"
        self._check_background(waiting)
        assert self._started_ids <= self._requests.keys(), "a request that ended counts as started"
        for state, place in ((SequenceState.RUNNING, self.running), (SequenceState.RETAINED, self.retained)):
            assert all(s.state is state for s in place.values()), f"a sequence among the {state.value} is not"
        assert self.running.keys() <= self.sequences.keys(), "a running sequence is lost"
        assert self.prefilling.keys() | self.decodes.sequences.keys() == self.running.keys(), (
            "one runs, and does nothing"
        )
        assert not self.prefilling.keys() & self.decodes.sequences.keys(), "a sequence prefills and decodes"
        self.decodes.check_invariants()
        assert all(s.finish_reason is None for s in sequences), "a finished sequence is not gone"
        assert all(s.finish_reason for s in self.retained.values()), "an unfinished sequence is retained"
        assert not self.retained or self.running, "a batch without running members was not released"
        for sequence in sequences:
            assert sequence in self.sequences_of(sequence.request.request_id), "a sequence without its request"
        self.turns.check_invariants(sequences)
        self._kv.check_invariants([*self.running.values(), *self.retained.values()])

    def _check_background(self, waiting: Iterable[Sequence]) -> None:
        num_tokens = sum(s.num_tokens for s in waiting if s.request.terms.is_background)
        assert self.num_queued_background_tokens == num_tokens, "background tokens in line miscounted"
        num_running = sum(s.request.terms.is_background for s in self.running.values())
        assert self.num_running_background == num_running, "running background sequences miscounted"
        unstarted = self._requests.keys() - self._started_ids
        num_unstarted = sum(any(s.request.terms.is_background for s in self._requests[name]) for name in unstarted)
        assert self._num_unstarted_background == num_unstarted, "background requests to begin miscounted"
