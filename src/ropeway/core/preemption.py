"""Who loses its memory so that others can go on. Knows no budgets and makes no rows of a plan.

Nobody is preempted but from the end of the policy order, or for one ahead of it, so somebody always finishes.
"""

from __future__ import annotations

from ropeway.core.batching import Batching
from ropeway.core.kv_manager import KVManager
from ropeway.core.roster import Roster
from ropeway.core.sequence import WaitingReason
from ropeway.core.waiting_line import WaitingLine


class Preemption:
    """Takes place before the rows of a step are planned. No victim boards again in the same plan."""

    def __init__(self, roster: Roster, line: WaitingLine, kv: KVManager, batching: Batching) -> None:
        self._roster = roster
        self._line = line
        self._kv = kv
        self._batching = batching

    def make_room(self, now_s: float) -> None:
        """Preempt, from the end of the policy order, until each running sequence can have the block it needs.

        The first of the order is spared: alone it always fits.
        """
        lacking, kv = self._roster.decodes.lacking, self._kv
        if not lacking or len(lacking) <= kv.num_free_blocks:
            return
        in_order = self._line.in_order(self._roster.running.values())
        while len(lacking) > kv.num_free_blocks:
            victim = in_order.pop()
            assert in_order, "the first in policy order does not fit the pool alone"
            self._roster.preempt(victim, WaitingReason.CAPACITY, now_s)

    def make_way(self, max_num_running: int, num_places: int, now_s: float) -> None:
        """Preempt for the first of the line, where it may take the place of others and then fits.

        num_places: that a latency target leaves; more may run, where it has taken some since they boarded.
        Those it may take the place of come after it in policy order, so this comes to an end.
        """
        newcomer, roster, kv, admission = self._line.first(), self._roster, self._kv, self._batching.admission
        if newcomer is None or not self._batching.may_board(len(roster.running), 1):
            return
        candidates = self._line.victims_for(newcomer, roster.running.values())
        if not candidates or roster.has_leader(newcomer):
            return
        is_entitled = newcomer is self._line.entitled  # it has the place of who was preempted, whatever is left by now
        has_place = len(roster.running) < (max_num_running if is_entitled else min(max_num_running, num_places))
        if has_place and not is_entitled and admission.may_board(newcomer, kv):
            return
        num_free_blocks = kv.num_free_blocks - len(roster.decodes.lacking)
        num_lacking = kv.num_blocks_to_take(newcomer, admission.num_slots(newcomer)) - num_free_blocks
        victims = []
        for victim, num_freed in zip(candidates, kv.num_blocks_freed(candidates, newcomer), strict=True):
            if has_place and num_lacking <= 0:
                break
            victims.append(victim)
            has_place = True
            num_lacking -= num_freed + (victim.sequence_id in roster.decodes.lacking)
        if has_place and num_lacking <= 0 and victims:
            self._line.entitle()
            for victim in victims:
                roster.preempt(victim, WaitingReason.POLICY, now_s)
