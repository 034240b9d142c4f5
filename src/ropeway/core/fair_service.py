"""Fair service between tenants by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024), and between the users of one tenant within its share. Knows no memory and no budgets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from ropeway.core.policy import Key, RankedLine
from ropeway.core.sequence import Sequence, SequenceState

# What one token counts. Decoding costs about twice a prompt's token: measured 1.6 to 2.6 ms against 0.9 to 1.0.
PREFILL_COST = 1.0
DECODE_COST = 2.0
# Of a tenant's users that have nothing unfinished, the counters of so many are remembered. (There are as many tenants
# as there are keys, so all of them are.)
NUM_REMEMBERED_USERS = 1024


class VirtualTokenCounters:
    """The tenant served least boards next, and within it the user served least, and within that the first to come.

    A counter adds up what was computed, divided by the tenant's weight. Tokens of a prompt count when the sequence
    boards, since it will compute them, and what it then leaves uncomputed is given back; an answer's tokens count as
    they are planned; what is computed again after a preemption does not count. Who had nobody waiting joins at the
    least counter of those who do (or, where nobody waits, of the one who did last), so idling earns no credit.

    A newcomer, whose tenant had nothing unfinished and is served no more than those who wait, may take the place of the
    most served tenant's newest sequences, and its prefill goes first: others share a step with it only where it takes
    more than two.

    For any two tenants f and g that have sequences waiting throughout, and where nobody is preempted, what they are
    served differs by at most 2 max(w_p longest prompt, w_q tokens running) (theorem 4.4 there). With one tenant and
    no users all of this is first come, first served.

    Weights come with the requests, so they can change while a server runs: what is served later counts by the new one.
    """

    def __init__(self) -> None:
        self._tenants: Ledger[Tenant] = Ledger(None)
        self._seats: dict[int, Seat] = {}  # of unfinished sequences
        self._num_decoding: dict[User, int] = {}  # sequences, of users with any
        self._num_waiting = 0
        self._num_boardings = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence, now_s: float) -> None:
        seat = self._seats.get(sequence.sequence_id)
        if seat is None:
            seat = self._seat(sequence)
        else:
            self._leave_decoding(seat)
            self._give_back(seat, sequence)
        tenant, user = seat.tenant, seat.user
        if not tenant.num_waiting:
            self._tenants.enlist(tenant)
        if not len(user.line):
            tenant.users.enlist(user)
        if not sequence.num_preemptions:
            least = self._tenants.least()
            seat.is_newcomer &= least is None or tenant.counter <= least.counter
        user.line.push(sequence)
        tenant.num_waiting += 1
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        seat = self._seats[sequence.sequence_id]
        seat.user.line.remove(sequence)
        self._left_line(seat)

    def first(self) -> Sequence | None:
        tenant = self._tenants.least()
        if tenant is None:
            return None
        user = tenant.users.least()
        assert user is not None, "a tenant waits, and none of its users"
        return user.line.first()

    def pop(self) -> Sequence:
        first = self.first()
        assert first is not None, "nobody waits"
        seat = self._seats[first.sequence_id]
        seat.user.line.pop()
        self._left_line(seat)
        return first

    def key(self, sequence: Sequence) -> Key:
        """Newcomers until their prompt is computed, in order of arrival; then who runs; the waiting come after them."""
        seat = self._seats[sequence.sequence_id]
        is_prefilling = sequence.num_computed_tokens < sequence.num_prefill_tokens
        if seat.is_newcomer and is_prefilling:
            return (0, sequence.sequence_id)
        place = 1 if sequence.state is SequenceState.RUNNING else 2
        return (place, seat.tenant.counter, seat.user.counter, sequence.sequence_id)

    def goes_first(self, sequence: Sequence) -> bool:
        return self._seats[sequence.sequence_id].is_newcomer and self._tenants.num_open > 1

    def in_order(self, running: Iterable[Sequence]) -> list[Sequence]:
        return sorted(running, key=self.key)

    def on_boarded(self, sequence: Sequence) -> None:
        seat = self._seats[sequence.sequence_id]
        num_known = max(seat.num_charged, sequence.num_recompute_tokens, sequence.num_computed_tokens)
        self._charge(seat, PREFILL_COST * max(0, sequence.num_tokens - num_known))
        seat.num_charged = sequence.num_tokens
        self._num_boardings += 1
        seat.tenant.turn = self._num_boardings

    def on_decoding(self, sequence: Sequence) -> None:
        seat = self._seats[sequence.sequence_id]
        seat.is_decoding = True
        self._num_decoding[seat.user] = self._num_decoding.get(seat.user, 0) + 1

    def on_planned(self) -> None:
        for user, num_tokens in self._num_decoding.items():
            user.counter += DECODE_COST * num_tokens
            user.tenant.counter += DECODE_COST * num_tokens * user.tenant.cost_factor

    def on_finished(self, sequence: Sequence) -> None:
        seat = self._seats.pop(sequence.sequence_id)
        self._leave_decoding(seat)
        self._give_back(seat, sequence)
        seat.tenant.users.close(seat.user)
        self._tenants.close(seat.tenant)
        if not seat.tenant.num_unfinished:
            # Users hold their tenant: a circle for each request of a lone caller would wait for the garbage collector.
            seat.tenant.users.let_go()

    def victims_for(self, newcomer: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        seat = self._seats[newcomer.sequence_id]
        if not seat.is_newcomer or newcomer.num_preemptions:
            return []
        keys = [(self.key(s), s) for s in running if self._seats[s.sequence_id].tenant.counter >= seat.tenant.counter]
        keys.sort(key=lambda entry: entry[0], reverse=True)
        return [s for key, s in keys if key[0] and self._seats[s.sequence_id].tenant is not seat.tenant]

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        waiting = list(waiting)
        assert len(waiting) == self._num_waiting, "the line and the waiting differ"
        by_user: dict[tuple[str, str | None], list[Sequence]] = {}
        for sequence in waiting:
            by_user.setdefault((sequence.request.terms.tenant, sequence.request.terms.user), []).append(sequence)
        for tenant in self._tenants.check_invariants():
            num_waiting = 0
            for user in tenant.users.check_invariants():
                user.line.check_invariants(by_user.pop((tenant.name or "", user.name), []))
                assert bool(len(user.line)) == (user.ticket is not None), "a user waits out of line"
                num_waiting += len(user.line)
            assert num_waiting == tenant.num_waiting, "a tenant's waiting are miscounted"
            assert bool(num_waiting) == (tenant.ticket is not None), "a tenant waits out of line"
        assert sum(self._num_decoding.values()) == sum(s.is_decoding for s in self._seats.values()), (
            "decoding miscounted"
        )
        assert not by_user, "somebody waits whose tenant or user is unknown"

    def _seat(self, sequence: Sequence) -> Seat:
        terms = sequence.request.terms
        tenant = self._tenants.open(terms.tenant, Tenant)
        tenant.cost_factor = 1.0 / terms.weight
        user = tenant.users.open(terms.user, partial(User, tenant=tenant))
        seat = Seat(tenant, user, is_newcomer=tenant.num_unfinished == 1 and not sequence.index)
        self._seats[sequence.sequence_id] = seat
        return seat

    def _leave_decoding(self, seat: Seat) -> None:
        if seat.is_decoding:
            seat.is_decoding = False
            self._num_decoding[seat.user] -= 1
            if not self._num_decoding[seat.user]:
                del self._num_decoding[seat.user]

    def _left_line(self, seat: Seat) -> None:
        seat.tenant.num_waiting -= 1
        self._num_waiting -= 1
        if not len(seat.user.line):
            seat.tenant.users.delist(seat.user)
        if not seat.tenant.num_waiting:
            self._tenants.delist(seat.tenant)

    def _charge(self, seat: Seat, cost: float) -> None:
        self._tenants.charge(seat.tenant, cost * seat.tenant.cost_factor)
        seat.tenant.users.charge(seat.user, cost)

    def _give_back(self, seat: Seat, sequence: Sequence) -> None:
        """What was charged when it boarded and will not be computed now."""
        surplus = seat.num_charged - max(sequence.num_computed_tokens, sequence.num_recompute_tokens)
        if surplus > 0:
            self._charge(seat, -PREFILL_COST * surplus)
            seat.num_charged -= surplus


@dataclass(slots=True, eq=False)
class User:
    """One user of a tenant: what it was served, and who of it waits. ticket: of its entry in its ledger's heap."""

    name: str | None
    tenant: Tenant
    counter: float = 0.0
    turn: int = 0
    num_unfinished: int = 0
    ticket: int | None = None
    line: RankedLine = field(default_factory=RankedLine)


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant: what it was served per weight, and its users. cost_factor: 1 / weight, as its newest request says.

    turn: its last boarding, counted over all: among equals, who boarded longest ago comes first. (A user's stays 0:
    there may be ever new ones.)
    """

    name: str | None
    cost_factor: float = 1.0
    counter: float = 0.0
    turn: int = 0
    num_unfinished: int = 0
    ticket: int | None = None
    num_waiting: int = 0
    users: Ledger[User] = field(init=False)

    def __post_init__(self) -> None:
        self.users = Ledger(NUM_REMEMBERED_USERS)


@dataclass(slots=True, eq=False)
class Seat:
    """On whose account a sequence is served. num_charged: leading tokens that were charged when it last boarded."""

    tenant: Tenant
    user: User
    is_newcomer: bool
    num_charged: int = 0
    is_decoding: bool = False


AccountT = TypeVar("AccountT", User, Tenant)


class Ledger(Generic[AccountT]):
    """Accounts with something unfinished; those listed, who wait, by counter.

    num_remembered: most accounts without anything unfinished whose counters are kept; None keeps all.

    A heap of (counter, turn, ticket, account). Counters rise while an entry lies in it, so an entry that comes up is
    renewed if it is out of date; one whose ticket is no longer its account's is dropped.
    """

    def __init__(self, num_remembered: int | None) -> None:
        self._accounts: dict[str | None, AccountT] = {}
        self._num_remembered = num_remembered
        self._remembered: OrderedDict[str | None, tuple[float, int]] = OrderedDict()  # (counter, turn), oldest first
        self._heap: list[tuple[float, int, int, AccountT]] = []
        self._num_listed = 0
        self._next_ticket = 0
        self._last_listed: AccountT | None = None  # who left the list last

    @property
    def num_open(self) -> int:
        """Accounts with something unfinished."""
        return len(self._accounts)

    def open(self, name: str | None, make_account: Callable[[str | None], AccountT]) -> AccountT:
        """The account of a name, for one more sequence; made where it has none."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = make_account(name)
            account.counter, account.turn = self._remembered.pop(name, (0.0, 0))
        account.num_unfinished += 1
        return account

    def close(self, account: AccountT) -> None:
        """One sequence of the account has ended."""
        account.num_unfinished -= 1
        if account.num_unfinished:
            return
        del self._accounts[account.name]
        self._remembered[account.name] = (account.counter, account.turn)
        if self._num_remembered is not None and len(self._remembered) > self._num_remembered:
            self._remembered.popitem(last=False)

    def let_go(self) -> None:
        """Of the accounts that are known and have nothing unfinished, since nobody opens one here again."""
        assert not self._accounts, "accounts with something unfinished are let go"
        self._heap.clear()
        self._last_listed = None

    def enlist(self, account: AccountT) -> None:
        """Somebody of the account waits, and nobody did: lift it to the least of those who wait."""
        least = self.least() or self._last_listed
        if least is not None:
            account.counter = max(account.counter, least.counter)
        self._num_listed += 1
        self._list(account)

    def delist(self, account: AccountT) -> None:
        """Nobody of the account waits any more."""
        account.ticket = None
        self._num_listed -= 1
        self._last_listed = account
        if len(self._heap) > 2 * self._num_listed + 16:
            self._heap = [entry for entry in self._heap if entry[3].ticket == entry[2]]
            heapify(self._heap)

    def least(self) -> AccountT | None:
        """Of those listed, who was served least; equals in the order of their turns, then of listing."""
        heap = self._heap
        while heap:
            counter, _, ticket, account = heap[0]
            if account.ticket != ticket:
                heappop(heap)
            elif counter < account.counter:
                heapreplace(heap, (account.counter, account.turn, ticket, account))
            else:
                return account
        return None

    def charge(self, account: AccountT, cost: float) -> None:
        """Add a cost, or give one back."""
        account.counter += cost
        if cost < 0 and account.ticket is not None:
            self._list(account)

    def check_invariants(self) -> list[AccountT]:
        """Check the heap against the accounts, which are returned. Raises AssertionError."""
        listed = [a for a in self._accounts.values() if a.ticket is not None]
        entries = {ticket: counter for counter, _, ticket, account in self._heap if account.ticket == ticket}
        assert self._num_listed == len(listed) == len(entries), "an account is listed twice, or lost from the list"
        assert all(entries[a.ticket] <= a.counter for a in listed if a.ticket is not None), "a listed counter fell"
        assert all(a.num_unfinished > 0 for a in self._accounts.values()), "an account without sequences is open"
        assert self._num_remembered is None or len(self._remembered) <= self._num_remembered, "too many are remembered"
        return list(self._accounts.values())

    def _list(self, account: AccountT) -> None:
        account.ticket = self._next_ticket
        self._next_ticket += 1
        heappush(self._heap, (account.counter, account.turn, account.ticket, account))
