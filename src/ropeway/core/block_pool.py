"""The KV blocks of one cache group: how many hold each, and which can be had. Knows no sequences; O(1) per block."""

from __future__ import annotations

from collections.abc import Sequence

from ropeway.core.prefix_index import PrefixIndex


class BlockPool:
    """Hands out block ids 0..num_blocks-1, each with a count of its holders.

    A block nobody holds is free: *blank*, or *parked* in the index under the hash of its tokens. Blank ones are handed
    out first, the one freed last before others: its memory is the warmest. Then parked ones are evicted. Blocks are
    given back last first, so of a prefix the end is evicted before what leads to it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blank_ids = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self.index = PrefixIndex(num_blocks)
        self.num_evicted_blocks = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._blank_ids) + self.index.num_parked

    def take(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks, whose hashes are forgotten; the caller has checked that they can be had."""
        blank_ids, num_holders = self._blank_ids, self._num_holders
        num_free_blocks = len(blank_ids) + self.index.num_parked
        assert num_blocks <= num_free_blocks, f"{num_blocks} blocks asked of {num_free_blocks}"
        first = max(0, len(blank_ids) - num_blocks)
        block_ids = blank_ids[first:]
        block_ids.reverse()
        del blank_ids[first:]
        if len(block_ids) < num_blocks:
            num_evicted = num_blocks - len(block_ids)
            self.num_evicted_blocks += num_evicted
            block_ids += self.index.evict(num_evicted)
        for block_id in block_ids:
            num_holders[block_id] = 1
        return block_ids

    def hold(self, block_ids: Sequence[int]) -> None:
        """Count one more holder of each of these indexed blocks."""
        for block_id in block_ids:
            if not self._num_holders[block_id]:
                self.index.unpark(block_id)
            self._num_holders[block_id] += 1

    def adopt(self, block_id: int) -> None:
        """Take a parked block with its tokens, and forget its hash: its holder may write to it."""
        self.index.unpark(block_id)
        self.index.remove(block_id)
        self._num_holders[block_id] = 1

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Count one holder less of each. Of the blank ones, the first will be the first taken again."""
        num_holders, unheld_ids = self._num_holders, []
        for block_id in reversed(block_ids):
            num_left = num_holders[block_id] - 1
            assert num_left >= 0, f"block {block_id} freed twice"
            num_holders[block_id] = num_left
            if not num_left:
                unheld_ids.append(block_id)
        self._blank_ids += self.index.park(unheld_ids)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Offer a held block under the hash of its tokens, unless another that is held has it already."""
        known_id = self.index.get(block_hash)
        if known_id is not None:
            if self._num_holders[known_id]:
                return
            # Whoever goes on from here holds the new block; the old one would be evicted before what follows it.
            self.index.unpark(known_id)
            self.index.remove(known_id)
            self._blank_ids.append(known_id)
        self.index.insert(block_hash, block_id)

    def is_held(self, block_id: int) -> bool:
        return self._num_holders[block_id] > 0

    def num_holders(self, block_id: int) -> int:
        return self._num_holders[block_id]

    def num_held(self, block_ids: Sequence[int]) -> int:
        """How many of these somebody holds."""
        num_holders = self._num_holders
        return sum([num_holders[block_id] > 0 for block_id in block_ids])

    def check_invariants(self, block_ids: Sequence[int]) -> None:
        """Check the counts against every entry of every block table, in any order.

        Raises AssertionError with the first violation.
        """
        counts = [0] * self._num_blocks
        for block_id in block_ids:
            counts[block_id] += 1
        assert counts == self._num_holders, "the holders of a block are miscounted"
        parked_ids = self.index.parked_block_ids()
        free_ids = parked_ids + self._blank_ids
        assert len(set(free_ids)) == len(free_ids) == self.num_free_blocks, "a block is free twice"
        assert sorted(free_ids) == [b for b in range(self._num_blocks) if not counts[b]], "free and held do not add up"
        assert all([self.index.has_hash(b) for b in parked_ids]), "a parked block has no hash"
        assert not any([self.index.has_hash(b) for b in self._blank_ids]), "a blank block has a hash"
        self.index.check_invariants()
