"""Which samples of requests with n > 1 may join the line. Knows no memory, budgets or policies.

Beside other requests of the same account a request is one, however many samples it asks for: they take turns. Between
accounts the policy decides, which hears of all samples where these want places or memory that are scarce.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ropeway.core.sequence import Sequence

AccountKey = tuple[str, str | None, int]  # tenant, user, priority


class SampleTurns:
    """Of each request one sample is under way, in line or running, from its arrival until the last has ended. The
    others are kept back until there is room for extra ones, of the requests in turn, or theirs is the next.

    Background samples never are: they make way for others anyhow.
    num_kept: samples kept back.
    """

    def __init__(self) -> None:
        self.num_kept = 0
        self._accounts: dict[AccountKey, _Account] = {}  # with unfinished requests
        self._keeping: dict[AccountKey, _Account] = {}  # of these, those that keep samples back
        self._standings: dict[str, _Standing] = {}  # of unfinished requests with n > 1

    @property
    def num_accounts(self) -> int:
        """With unfinished requests."""
        return len(self._accounts)

    def is_kept(self, sequence: Sequence) -> bool:
        standing = self._standings.get(sequence.request_id)
        return standing is not None and sequence in standing.account.kept.get(sequence.request_id, ())

    def add(self, sequences: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        """The sequences of a new request; those that join the line now."""
        first = sequences[0]
        if first.request.terms.is_background:
            return sequences
        key = _key(first)
        account = self._accounts.setdefault(key, _Account())
        if len(sequences) == 1:
            account.num_single += 1
            return sequences
        account.num_multiple += 1
        account.kept[first.request_id] = deque(sequences[1:])
        self._keeping[key] = account
        self._standings[first.request_id] = _Standing(account, len(sequences))
        self.num_kept += len(sequences) - 1
        return sequences[:1]

    def release(self, num_extra: Callable[[int, int], int]) -> list[Sequence]:
        """Those that join the line now.

        num_extra: of an account with so many requests of one unfinished sample and so many of more, how many samples
        may be under way beyond the first of each request.
        """
        released = []
        for key, account in list(self._keeping.items()):
            released += [self._take(account, request_id) for request_id in list(account.due)]
            most = num_extra(account.num_single, account.num_multiple)
            while account.kept and account.num_extra < most:
                released.append(self._take(account, next(iter(account.kept))))
            if not account.kept:
                del self._keeping[key]
        return released

    def discard(self, sequence: Sequence) -> bool:
        """A sequence ended; whether it was kept back."""
        if sequence.request.terms.is_background:
            return False
        key, request_id = _key(sequence), sequence.request_id
        account, standing = self._accounts[key], self._standings.get(request_id)
        was_kept = self.is_kept(sequence)
        if standing is None:
            account.num_single -= 1
        else:
            self._discard_sample(sequence, standing, was_kept=was_kept)
        if not account.kept:
            self._keeping.pop(key, None)
        if not account.num_single and not account.num_multiple:
            del self._accounts[key]
        return was_kept

    def _discard_sample(self, sequence: Sequence, standing: _Standing, *, was_kept: bool) -> None:
        account, request_id = standing.account, sequence.request_id
        if was_kept:
            samples = account.kept[request_id]
            samples.remove(sequence)
            if not samples:
                del account.kept[request_id]
            self.num_kept -= 1
        else:
            standing.num_under_way -= 1
            account.num_extra -= standing.num_under_way > 0
        standing.num_unfinished -= 1
        if standing.num_unfinished == 1:
            account.num_multiple -= 1
            account.num_single += 1
        if not standing.num_unfinished:
            account.num_single -= 1
            account.due.pop(request_id, None)
            del self._standings[request_id]
        elif not standing.num_under_way:
            account.due[request_id] = None

    def check_invariants(self, unfinished: Iterable[Sequence]) -> None:
        """Check that every sample of an unfinished request is counted where it is. Raises AssertionError."""
        by_request: dict[str, list[Sequence]] = {}
        for sequence in unfinished:
            if not sequence.request.terms.is_background:
                by_request.setdefault(sequence.request_id, []).append(sequence)
        kept = [s for account in self._accounts.values() for samples in account.kept.values() for s in samples]
        assert len(kept) == self.num_kept and all([s in by_request[s.request_id] for s in kept]), "kept miscounted"
        expected: dict[AccountKey, list[int]] = {}  # requests of one sample, of more, samples that are extra
        for samples in by_request.values():
            counts = expected.setdefault(_key(samples[0]), [0, 0, 0])
            counts[len(samples) > 1] += 1
            num_under_way = sum(s not in kept for s in samples)
            counts[2] += max(0, num_under_way - 1)
            is_due = samples[0].request_id in self._accounts[_key(samples[0])].due
            assert is_due == (not num_under_way), "a request with none under way has no turn, or another has"
        counted = {key: [a.num_single, a.num_multiple, a.num_extra] for key, a in self._accounts.items()}
        assert counted == expected, "requests of one sample or of more miscounted, or the samples under way"
        assert {key for key, account in self._accounts.items() if account.kept} == self._keeping.keys(), "not kept"

    def _take(self, account: _Account, request_id: str) -> Sequence:
        """The next sample of a request; of the others it comes last then."""
        samples = account.kept.pop(request_id)
        sequence = samples.popleft()
        if samples:
            account.kept[request_id] = samples
        self.num_kept -= 1
        standing = self._standings[request_id]
        account.num_extra += standing.num_under_way > 0
        standing.num_under_way += 1
        account.due.pop(request_id, None)
        return sequence


@dataclass(slots=True, eq=False)
class _Account:
    """num_single: requests with one unfinished sample; num_multiple: with more. num_extra: samples under way beyond the
    first of each request. kept: samples kept back, by request, the next to be asked first. due: requests with none
    under way.
    """

    num_single: int = 0
    num_multiple: int = 0
    num_extra: int = 0
    kept: OrderedDict[str, deque[Sequence]] = field(default_factory=OrderedDict)
    due: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Standing:
    """Of a request with n > 1: its unfinished samples, and how many of them are under way."""

    account: _Account
    num_unfinished: int
    num_under_way: int = 1


def _key(sequence: Sequence) -> AccountKey:
    terms = sequence.request.terms
    return terms.tenant, terms.user, terms.priority
