"""The block pool and its index against a naive model: dictionaries of holders, and a list of what is evicted next."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ropeway.core.block_pool import BlockPool


def name(number: int) -> bytes:
    return b"hash %d" % number


class PoolMachine(RuleBasedStateMachine):
    """`tables` are what sequences hold; `holders`, `hashes` and `parked` say what must be so of each block."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.holders = dict.fromkeys(range(num_blocks), 0)
        self.hashes: dict[int, bytes] = {}
        self.parked: list[int] = []  # the next to be evicted first
        self.num_evicted = 0
        self.num_named = 0

    @rule(share=st.floats(0, 1))
    def take(self, share: float) -> None:
        num_free = self.pool.num_free_blocks
        num_blocks = round(share * num_free)
        num_blank = num_free - len(self.parked)
        evicted = self.parked[: max(0, num_blocks - num_blank)]
        block_ids = self.pool.take(num_blocks)
        assert len(set(block_ids)) == num_blocks and not any(self.holders[b] for b in block_ids), "a held block"
        taken = [block_id for block_id in block_ids if block_id in self.hashes]
        assert taken == evicted, "not the blocks that were parked first, or a blank one was spared"
        for block_id in block_ids:
            self.holders[block_id] = 1
            self.hashes.pop(block_id, None)
        self.parked = self.parked[len(evicted) :]
        self.num_evicted += len(evicted)
        self.tables.append(block_ids)

    @precondition(lambda self: self.hashes)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.hashes)), unique=True))
        self.pool.hold(block_ids)
        for block_id in block_ids:
            self.holders[block_id] += 1
            if block_id in self.parked:
                self.parked.remove(block_id)
        self.tables.append(block_ids)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.parked))
        self.pool.adopt(block_id)
        self.parked.remove(block_id)
        self.holders[block_id] = 1
        del self.hashes[block_id]
        self.tables.append([block_id])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.give_back(table)
        for block_id in reversed(table):
            self.holders[block_id] -= 1
            if not self.holders[block_id] and block_id in self.hashes:
                self.parked.append(block_id)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), is_known=st.booleans())
    def publish(self, data: st.DataObject, is_known: bool) -> None:
        """A held block of the caller's alone gets a hash: a new one, or one that another block may have."""
        blank = sorted({b for table in self.tables for b in table} - self.hashes.keys())
        if not blank:
            return
        block_id = data.draw(st.sampled_from(blank))
        if is_known and self.num_named:
            number = data.draw(st.integers(0, self.num_named - 1))
        else:
            number, self.num_named = self.num_named, self.num_named + 1
        other = next((b for b, known in self.hashes.items() if known == name(number)), None)
        self.pool.publish(block_id, name(number))
        if other is not None and self.holders[other]:
            return
        if other is not None:
            self.parked.remove(other)
            del self.hashes[other]
        self.hashes[block_id] = name(number)

    @invariant()
    def the_pool_is_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_invariants([block_id for table in self.tables for block_id in table])
        assert pool.index.parked_block_ids() == self.parked
        assert pool.num_free_blocks == sum(not n for n in self.holders.values())
        assert pool.num_evicted_blocks == self.num_evicted
        assert all(pool.is_held(b) == (n > 0) for b, n in self.holders.items())
        assert pool.num_held(list(self.holders)) == sum(n > 0 for n in self.holders.values())
        found = {pool.index.get(name(number)): name(number) for number in range(self.num_named)}
        assert {b: known for b, known in found.items() if b is not None} == self.hashes
        assert len(pool.index) == len(self.hashes)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
