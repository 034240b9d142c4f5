"""Boards whom the pool is expected to hold to the end, by the lengths of answers learned of late. Knows no queues.

The idea to admit by the peak of future memory is that of the Past-Future scheduler (Gong et al., ASPLOS'25), which
samples lengths from past ones; here the expected peak and its deviation are worked out from hazards, without chance.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import sqrt

from ropeway.core.answer_lengths import EDGES, HORIZONS, NUM_BINS, AnswerLengths, bin_of
from ropeway.core.kv_manager import KVManager
from ropeway.core.sequence import Sequence, WaitingReason

GroupKey = tuple[str | None, int]
Sums = list[int]  # over some sequences: how many, their tokens, the squares of these

NUM_HORIZONS = len(HORIZONS)
CERTAIN = (1.0,) * NUM_HORIZONS
DEVIATIONS = 2.0  # above what is expected at each horizon, that must fit: at each it does with 97.7 %
MAX_CAUTION = 3.0  # more of them, after preemptions
CAUTION_PER_PREEMPTION = 0.2
CALM_PER_ANSWER = 0.004  # so no more than one answer in 50 is preempted for long
# Steps until the next outlook is begun, and more of them with many running.
MIN_KEPT_STEPS = 16
RUNNING_PER_KEPT_STEP = 128
# To look ahead costs some 15 us for each sequence, so a step does it for an eighth of them, or for so many.
NUM_PARTS = 8
MIN_PART = 32


class PredictiveAdmission:
    """Grants what is known now, to whom the expected peak of use, and some deviations more, leaves room for.

    At each horizon the expected use is that of those still running, each grown by one token a step. Answers that cannot
    end early are certain. Where everybody's max_tokens fit, nobody is predicted. After a preemption more deviations are
    kept free for a while. Use is of memory held, so blocks that are shared count once.

    An outlook serves some steps: what it expects of a moment to come stays as true, horizons that have passed are left
    out, and who boards is added. Those who end meanwhile it expected to, more or less: its deviations hold that. So the
    next one can be made in parts, a step each, while the last still serves; one that served twice its time does not.
    """

    def __init__(self) -> None:
        self._lengths = AnswerLengths()
        self._running: dict[int, _Prospect] = {}
        self._bins: dict[int, int] = {}  # of each sequence that ran, the bin up to which it was observed
        self._num_reserved_tokens = 0  # were everybody to use its max_tokens
        self._caution = 0.0
        self._num_steps = 0
        self._outlook: _Outlook | None = None
        self._survey: _Survey | None = None  # of the next outlook, while that is made
        self._refused: tuple[int, int, int, float] | None = None  # what was asked of this outlook last, in vain

    def num_slots(self, sequence: Sequence) -> int:
        return sequence.num_tokens

    def begin_step(self) -> None:
        self._num_steps += 1
        if self._survey is not None:
            self._look_ahead(self._survey)
        if self._outlook is not None and self._outlook_age >= 2 * self._num_kept_steps:
            self._outlook = None

    def may_board(self, sequence: Sequence, kv: KVManager) -> bool:
        if kv.num_blocks_to_take(sequence, sequence.num_tokens) > kv.num_free_blocks:
            return False
        block_size = kv.block_size
        num_pool_tokens = kv.num_blocks * block_size
        num_waste_tokens = block_size * (len(self._running) + 1)  # of last blocks
        if self._num_reserved_tokens + sequence.max_num_tokens + num_waste_tokens <= num_pool_tokens:
            return True
        outlook = self._current_outlook(kv)
        if outlook is None:
            return False
        first, deviations = bisect_left(HORIZONS, self._outlook_age), DEVIATIONS + self._caution
        question = (sequence.sequence_id, sequence.num_tokens, first, deviations)
        if question == self._refused:
            return False
        if outlook.has_room(self._share_of(sequence), sequence, deviations, first, num_pool_tokens):
            return True
        self._refused = question
        return False

    def _current_outlook(self, kv: KVManager) -> _Outlook | None:
        """The outlook that serves now; None while the first one is being made. Begins the next one in time."""
        is_due = self._outlook is None or self._outlook_age >= self._num_kept_steps
        if is_due and self._survey is None:
            self._survey = _Survey(list(self._running.values()), self._new_outlook(kv))
            self._look_ahead(self._survey)
        return self._outlook

    @property
    def _outlook_age(self) -> int:
        """Steps since the outlook that serves was begun."""
        assert self._outlook is not None, "there is no outlook"
        return self._num_steps - self._outlook.begun_at_step

    @property
    def _num_kept_steps(self) -> int:
        return MIN_KEPT_STEPS + len(self._running) // RUNNING_PER_KEPT_STEP

    def on_boarded(self, sequence: Sequence) -> None:
        self._running[sequence.sequence_id] = _Prospect(sequence)
        self._bins.setdefault(sequence.sequence_id, 0)
        self._num_reserved_tokens += sequence.max_num_tokens
        survey = self._survey
        for outlook in (self._outlook, None if survey is None else survey.outlook):
            if outlook is not None:
                outlook.add(self._share_of(sequence), sequence)
                self._refused = None

    def on_preempted(self, sequence: Sequence) -> None:
        self._leave(sequence)
        if sequence.waiting_reason is WaitingReason.CAPACITY:
            self._caution = min(MAX_CAUTION, self._caution + CAUTION_PER_PREEMPTION)

    def on_finished(self, sequence: Sequence) -> None:
        if sequence.sequence_id in self._running:
            self._leave(sequence)
        first_bin = self._bins.pop(sequence.sequence_id, None)
        if first_bin is None:
            return
        num_generated = sequence.num_generated_tokens
        has_ended = sequence.finish_reason == "stop" and num_generated > 0
        last_bin = max(first_bin, bin_of(num_generated - has_ended))
        self._lengths.observe(sequence.request.terms.tenant, first_bin, last_bin, has_ended)
        self._caution = max(0.0, self._caution - CALM_PER_ANSWER)

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence.sequence_id]
        self._num_reserved_tokens -= sequence.max_num_tokens

    def _share_of(self, sequence: Sequence) -> tuple[float, ...] | None:
        """What is expected of it at each horizon; None where nothing but max_tokens ends it."""
        request = sequence.request
        if not request.may_end_early:
            return None
        return self._lengths.shares(request.terms.tenant, bin_of(sequence.num_generated_tokens))

    def _new_outlook(self, kv: KVManager) -> _Outlook:
        num_held_slots = (kv.num_blocks - kv.num_free_blocks) * kv.block_size
        num_slots = sum([prospect.sequence.num_slots for prospect in self._running.values()])
        share_held = min(1.0, num_held_slots / num_slots) if num_slots else 1.0
        return _Outlook(self._num_steps, share_held, kv.block_size / 2)

    def _look_ahead(self, survey: _Survey) -> None:
        """Add the next part of those who run to an outlook; once it holds all of them, it serves."""
        running = self._running
        groups = self._group([p for p in survey.next_part() if running.get(p.sequence.sequence_id) is p])
        for (tenant_or_none, now_bin), group in groups.items():
            shares = None if tenant_or_none is None else self._lengths.shares(tenant_or_none, now_bin)
            survey.outlook.add_group(shares, group)
        if survey.is_done:
            self._outlook, self._survey, self._refused = survey.outlook, None, None

    def _group(self, prospects: list[_Prospect]) -> dict[GroupKey, dict[int, Sums]]:
        """Those with the same expectations together; who reached another bin is learned from on the way."""
        groups: dict[GroupKey, dict[int, Sums]] = {}
        bins, observed = self._bins, []
        for prospect in prospects:
            sequence = prospect.sequence
            num_tokens = sequence.num_tokens
            if num_tokens >= prospect.num_tokens_to_regroup:
                prospect.regroup()
                tenant, now_bin = prospect.key
                first_bin = bins[sequence.sequence_id]
                if tenant is not None and now_bin > first_bin:
                    observed.append((tenant, first_bin, now_bin))
                    bins[sequence.sequence_id] = now_bin
            group = groups.get(prospect.key)
            if group is None:
                group = groups[prospect.key] = {}
            sums = group.get(prospect.cap)
            if sums is None:
                group[prospect.cap] = [1, num_tokens, num_tokens * num_tokens]
            else:
                sums[0] += 1
                sums[1] += num_tokens
                sums[2] += num_tokens * num_tokens
        for tenant, first_bin, last_bin in observed:
            self._lengths.observe(tenant, first_bin, last_bin, False)
        return groups


@dataclass(slots=True, eq=False)
class _Prospect:
    """One who runs, and those it is counted with until it knows num_tokens_to_regroup tokens.

    key: its tenant and the bin of its length; nobody's where nothing but max_tokens ends it. cap: the horizon at which
    that does.
    """

    sequence: Sequence
    key: GroupKey = (None, 0)
    cap: int = 0
    num_tokens_to_regroup: int = 0

    def regroup(self) -> None:
        sequence = self.sequence
        request, num_generated = sequence.request, sequence.num_generated_tokens
        max_tokens = request.max_tokens
        self.cap = bisect_left(HORIZONS, max_tokens - num_generated)
        num_to_regroup = max_tokens - HORIZONS[self.cap - 1] if self.cap else max_tokens
        if request.may_end_early:
            now_bin = bin_of(num_generated)
            self.key = (request.terms.tenant, now_bin)
            if now_bin + 1 < NUM_BINS:
                num_to_regroup = min(num_to_regroup, EDGES[now_bin + 1])
        self.num_tokens_to_regroup = sequence.num_prompt_tokens + num_to_regroup


class _Survey:
    """Goes through those who ran when it began, a tenant after the other, for an outlook that is not yet complete."""

    def __init__(self, prospects: list[_Prospect], outlook: _Outlook) -> None:
        self.outlook = outlook
        # Tenants as they come, not by name: a decision log has other names, and sums of floats depend on the order.
        by_tenant: dict[str, list[_Prospect]] = {}
        for prospect in prospects:
            by_tenant.setdefault(prospect.sequence.request.terms.tenant, []).append(prospect)
        self._prospects = [prospect for group in by_tenant.values() for prospect in group]
        self._part_size = max(MIN_PART, -(-len(prospects) // NUM_PARTS))
        self._num_done = 0

    @property
    def is_done(self) -> bool:
        return self._num_done >= len(self._prospects)

    def next_part(self) -> list[_Prospect]:
        first, self._num_done = self._num_done, self._num_done + self._part_size
        return self._prospects[first : self._num_done]


class _Outlook:
    """Expected tokens of memory, and their variance, at each horizon from the step at which it was begun.

    share_held: memory held, of the tokens known: less than 1 where blocks are shared. waste: of each last block.
    """

    def __init__(self, begun_at_step: int, share_held: float, waste: float) -> None:
        self.begun_at_step = begun_at_step
        self._share_held = share_held
        self._waste = waste
        self._expected = [0.0] * NUM_HORIZONS
        self._variance = [0.0] * NUM_HORIZONS

    def add_group(self, shares: tuple[float, ...] | None, group: dict[int, Sums]) -> None:
        """Sequences that share expectations, by the horizon at which their max_tokens ends them."""
        expected, variance, held = self._expected, self._variance, self._share_held
        shares = CERTAIN if shares is None else shares
        end = len(shares)
        caps = sorted(group, reverse=True)
        count, now, now_squares, now_held = 0, 0.0, 0.0, 0.0
        for cap, next_cap in zip(caps, [*caps[1:], -1], strict=True):  # those of later caps are there at earlier ones
            more, total, squares = group[cap]
            count += more
            now += total * held + more * self._waste
            now_held += total * held
            now_squares += squares * held * held
            places = slice(next_cap + 1, min(cap + 1, end))
            share_of, horizon_of = shares[places], HORIZONS[places]
            expected[places] = [
                sum_ + share * (now + count * horizon)
                for sum_, share, horizon in zip(expected[places], share_of, horizon_of, strict=False)
            ]
            variance[places] = [
                sum_ + share * (1.0 - share) * (now_squares + horizon * (2 * now_held + count * horizon))
                for sum_, share, horizon in zip(variance[places], share_of, horizon_of, strict=False)
            ]

    def add(self, shares: tuple[float, ...] | None, sequence: Sequence) -> None:
        """One that boards."""
        num_tokens = sequence.num_tokens
        self.add_group(shares, {self._cap(sequence): [1, num_tokens, num_tokens * num_tokens]})

    def has_room(
        self, shares: tuple[float, ...] | None, sequence: Sequence, deviations: float, first: int, num_tokens: int
    ) -> bool:
        """Whether, with one more, what is expected and `deviations` above it is within num_tokens at all horizons.

        first: the first of them ahead. The newcomer's own horizons count from now, which makes next to no difference.
        """
        now, cap = sequence.num_tokens + self._waste, self._cap(sequence)
        num_expected = min(cap + 1, NUM_HORIZONS if shares is None else len(shares))
        for i in range(first, NUM_HORIZONS):
            expected, variance = self._expected[i], self._variance[i]
            if i < num_expected:
                share, then = 1.0 if shares is None else shares[i], now + HORIZONS[i]
                expected += share * then
                variance += share * (1.0 - share) * then * then
            if expected + deviations * sqrt(variance) > num_tokens:
                return False
        return True

    def _cap(self, sequence: Sequence) -> int:
        return bisect_left(HORIZONS, sequence.max_num_tokens - sequence.num_tokens)
