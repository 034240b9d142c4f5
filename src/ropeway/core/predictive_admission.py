"""Boards whom the pool is expected to hold to the end, by the lengths of answers learned of late. Knows no queues.

The idea to admit by the peak of future memory is that of the Past-Future scheduler (Gong et al., ASPLOS'25), which
samples lengths from past ones; here the expected peak and its deviation are worked out from hazards, without chance.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import sqrt

from ropeway.core.answer_lengths import EDGES, HORIZONS, AnswerLengths, bin_of
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
# Steps that an outlook is kept, and more of them with many running: to look ahead costs up to 5 us for each of those.
MIN_KEPT_STEPS = 16
RUNNING_PER_KEPT_STEP = 128


class PredictiveAdmission:
    """Grants what is known now, to whom the expected peak of use, and some deviations more, leaves room for.

    At each horizon the expected use is that of those still running, each grown by one token a step. Answers that cannot
    end early are certain. Where everybody's max_tokens fit, nobody is predicted. After a preemption more deviations are
    kept free for a while. Use is of memory held, so blocks that are shared count once.

    An outlook serves some steps: what it expects of a moment to come stays as true, horizons that have passed are left
    out, and who boards is added. Those who end meanwhile it expected to, more or less: its deviations hold that.
    """

    def __init__(self) -> None:
        self._lengths = AnswerLengths()
        self._running: dict[int, _Prospect] = {}
        self._bins: dict[int, int] = {}  # of each sequence that ran, the bin up to which it was observed
        self._num_reserved_tokens = 0  # were everybody to use its max_tokens
        self._caution = 0.0
        self._outlook: _Outlook | None = None
        self._outlook_age = 0  # steps
        self._refused: tuple[int, int, int, float] | None = None  # what was asked of this outlook last, in vain

    def num_slots(self, sequence: Sequence) -> int:
        return sequence.num_tokens

    def begin_step(self) -> None:
        self._outlook_age += 1
        if self._outlook_age >= MIN_KEPT_STEPS + len(self._running) // RUNNING_PER_KEPT_STEP:
            self._outlook = None

    def may_board(self, sequence: Sequence, kv: KVManager) -> bool:
        if kv.num_blocks_to_take(sequence, sequence.num_tokens) > kv.num_free_blocks:
            return False
        block_size = kv.block_size
        num_pool_tokens = kv.num_blocks * block_size
        num_waste_tokens = block_size * (len(self._running) + 1)  # of last blocks
        if self._num_reserved_tokens + sequence.max_num_tokens + num_waste_tokens <= num_pool_tokens:
            return True
        if self._outlook is None:
            self._outlook, self._outlook_age = self._look_ahead(kv), 0
            self._refused = None
        first, deviations = bisect_left(HORIZONS, self._outlook_age), DEVIATIONS + self._caution
        question = (sequence.sequence_id, sequence.num_tokens, first, deviations)
        if question == self._refused:
            return False
        peak = self._outlook.peak_with(self._share_of(sequence), sequence, deviations, first)
        if peak <= num_pool_tokens:
            return True
        self._refused = question
        return False

    def on_boarded(self, sequence: Sequence) -> None:
        self._running[sequence.sequence_id] = _Prospect(sequence)
        self._bins.setdefault(sequence.sequence_id, 0)
        self._num_reserved_tokens += sequence.max_num_tokens
        if self._outlook is not None:
            self._outlook.add(self._share_of(sequence), sequence)
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
        if not request.stop_token_ids and not request.params.stop:
            return None
        return self._lengths.shares(request.terms.tenant, bin_of(sequence.num_generated_tokens))

    def _look_ahead(self, kv: KVManager) -> _Outlook:
        """The outlook of everybody who runs; those who reached another bin are learned from on the way."""
        groups: dict[GroupKey, dict[int, Sums]] = {}
        lengths, observed = self._lengths, []
        num_slots = 0
        for prospect in self._running.values():
            sequence = prospect.sequence
            num_tokens = sequence.num_tokens
            num_slots += sequence.num_slots
            if num_tokens >= prospect.num_tokens_to_regroup:
                prospect.regroup()
                tenant, now_bin = prospect.key
                first_bin = self._bins[sequence.sequence_id]
                if tenant is not None and now_bin > first_bin:
                    observed.append((tenant, first_bin, now_bin))
                    self._bins[sequence.sequence_id] = now_bin
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
            lengths.observe(tenant, first_bin, last_bin, False)
        held = kv.num_blocks - kv.num_free_blocks
        outlook = _Outlook(min(1.0, held * kv.block_size / num_slots) if num_slots else 1.0, kv.block_size / 2)
        for (tenant_or_none, now_bin), group in groups.items():
            outlook.add_group(None if tenant_or_none is None else lengths.shares(tenant_or_none, now_bin), group)
        return outlook


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
        cap = bisect_left(HORIZONS, request.max_tokens - num_generated)
        changes = [request.max_tokens - HORIZONS[cap - 1]] if cap else []
        if request.stop_token_ids or request.params.stop:
            now_bin = bin_of(num_generated)
            changes += EDGES[now_bin + 1 : now_bin + 2]
            self.key = (request.terms.tenant, now_bin)
        self.cap = cap
        self.num_tokens_to_regroup = sequence.num_prompt_tokens + min(changes, default=request.max_tokens)


class _Outlook:
    """Expected tokens of memory, and their variance, at each horizon.

    share_held: memory held, of the tokens known: less than 1 where blocks are shared. waste: of each last block.
    """

    def __init__(self, share_held: float, waste: float) -> None:
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

    def peak_with(self, shares: tuple[float, ...] | None, sequence: Sequence, deviations: float, first: int) -> float:
        """The most memory, over the horizons ahead, that is expected with one more, and `deviations` above it.

        first: the first of them. The newcomer's own horizons count from now, which makes next to no difference.
        """
        peak, now, cap = 0.0, sequence.num_tokens + self._waste, self._cap(sequence)
        num_expected = min(cap + 1, NUM_HORIZONS if shares is None else len(shares))
        for i in range(first, NUM_HORIZONS):
            expected, variance = self._expected[i], self._variance[i]
            if i < num_expected:
                share, then = 1.0 if shares is None else shares[i], now + HORIZONS[i]
                expected += share * then
                variance += share * (1.0 - share) * then * then
            peak = max(peak, expected + deviations * sqrt(variance))
        return peak

    def _cap(self, sequence: Sequence) -> int:
        return bisect_left(HORIZONS, sequence.max_num_tokens - sequence.num_tokens)
