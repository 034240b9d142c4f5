"""Prompts in a step: who goes on with one, who boards, and what keeps the first of the line from doing so.

Knows no times and no token values; how much a step holds it asks of the budget.
"""

from __future__ import annotations

from ropeway.core.batching import Batching
from ropeway.core.kv_manager import KVManager
from ropeway.core.plan_builder import PlanBuilder
from ropeway.core.roster import Roster
from ropeway.core.sequence import Sequence, WaitingReason
from ropeway.core.waiting_line import WaitingLine
from ropeway.core.wave import Wave


class Boarding:
    """Plans chunks of those who prefill and of those who board, in policy order.

    Nobody overtakes one that cannot board; only one that would compute what another is computing lets others pass.
    One whose long prompt took a whole step comes last in the next: of two steps it has one, as of one step half.
    A wave goes on in every step, before any other prompt; it is dropped where its sequence was preempted or has ended.

    is_crowded: in the last plan somebody in line, no background sequence, lacked a place or memory.
    """

    def __init__(self, roster: Roster, line: WaitingLine, kv: KVManager, batching: Batching) -> None:
        self._roster = roster
        self._line = line
        self._kv = kv
        self._batching = batching
        self.is_crowded = False
        self._wave: Wave | None = None  # under way
        self._giving_way_id: int | None = None  # of the sequence whose long prompt took the last step

    def plan_prefills(self, builder: PlanBuilder, max_num_running: int, num_running_before: int) -> list[Sequence]:
        """Fill what the decodes leave of the budget; those with a chunk in this step.

        num_running_before: sequences that ran when the step began.
        """
        line, roster = self._line, self._roster
        others = self._go_on(builder)
        giving_way = None if self._giving_way_id is None else others.pop(self._giving_way_id, None)
        builder.has_turns = giving_way is not None
        prefilling = line.in_order(others.values())
        prefilling.reverse()
        is_boarding = True
        self.is_crowded = False
        while True:
            newcomer = line.first() if is_boarding else None
            if newcomer is not None and not (prefilling and line.key(prefilling[-1]) < line.key(newcomer)):
                reason = self._obstacle(newcomer, builder, max_num_running, num_running_before)
                if reason is None:
                    builder.add_prefill(roster.board(), goes_first=line.goes_first(newcomer))
                    continue
                newcomer.waiting_reason = reason
                self.is_crowded |= reason is WaitingReason.CAPACITY and not newcomer.request.terms.is_background
                is_boarding = reason is WaitingReason.DEFERRED and self._defer(newcomer)
            elif prefilling:
                sequence = prefilling.pop()
                builder.add_prefill(sequence, goes_first=line.goes_first(sequence))
            else:
                break
        if giving_way is not None:
            builder.add_prefill(giving_way, goes_first=line.goes_first(giving_way))
        chunks = builder.end_prefills()
        self._wave = builder.wave
        if chunks:
            self._giving_way_id = builder.whole_id
        for sequence, num_new_tokens in chunks:
            line.on_prefilled(sequence, num_new_tokens)
            if sequence.num_computed_tokens == sequence.num_tokens:
                roster.begin_decoding(sequence)
        return [sequence for sequence, _ in chunks]

    def _go_on(self, builder: PlanBuilder) -> dict[int, Sequence]:
        """Plan a slice of the wave under way; all others who prefill."""
        others = dict(self._roster.prefilling)
        wave = self._current_wave()
        if wave is not None and builder.go_on(wave):
            del others[wave.sequence.sequence_id]
        return others

    def _current_wave(self) -> Wave | None:
        """The wave under way, of a sequence that prefills still."""
        wave = self._wave
        if wave is None or wave.is_done or wave.sequence.sequence_id not in self._roster.prefilling:
            return None
        return wave

    def check_invariants(self) -> None:
        """Check the wave under way. Raises AssertionError with the first violation."""
        wave = self._current_wave()
        if wave is not None:
            wave.check_invariants()

    def _defer(self, sequence: Sequence) -> bool:
        leader = self._kv.leader(sequence)
        assert leader is not None, "it waits for somebody"
        return self._line.defer(leader, self._kv.num_shared_blocks(sequence, leader))

    def _obstacle(
        self, sequence: Sequence, builder: PlanBuilder, max_num_running: int, num_running_before: int
    ) -> WaitingReason | None:
        """Why the first of the line does not board; None where it may."""
        batching, kv, num_running = self._batching, self._kv, len(self._roster.running)
        # The entitled one has the place of who was preempted for it, however few the costs of now leave.
        has_place = num_running < builder.budget.max_num_running or sequence is self._line.entitled
        if num_running >= max_num_running or not has_place:
            return WaitingReason.CAPACITY
        if not batching.may_board(num_running_before, builder.num_tokens_left):
            return WaitingReason.BUDGET if batching.may_board(num_running_before, 1) else WaitingReason.CAPACITY
        if self._roster.has_leader(sequence):
            return WaitingReason.DEFERRED
        if sequence.match.num_tokens and builder.budget.num_prefill_tokens(sequence.match.num_tokens) < 1:
            return WaitingReason.BUDGET  # blocks are copied in the step that computes on them
        if sequence.sequence_id in self._roster.preempted_now_ids:
            return WaitingReason.CAPACITY
        if sequence is self._line.entitled:
            num_slots = batching.admission.num_slots(sequence)
            may_board = kv.num_blocks_to_take(sequence, num_slots) <= kv.num_free_blocks
        else:
            may_board = not num_running or batching.admission.may_board(sequence, kv)
        return None if may_board else WaitingReason.CAPACITY
