"""Block tables: which sequence holds which KV blocks, in every cache group. Knows no queues, budgets or policies.

Whoever asks for blocks checks `num_free_blocks` first. How blocks come to be free (later: evicted from a prefix
cache) stays in here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ropeway.core.block_pool import BlockPool
from ropeway.core.sequence import Sequence as TokenSequence
from ropeway.errors import ConfigError


class KVManager:
    """The block pools of a model, one per cache group.

    num_blocks: blocks of each group. block_size: tokens per block.
    Every group keeps every position, so a sequence holds equally many blocks in each.

    Raises ConfigError for a pool or a block that holds nothing.
    """

    def __init__(self, num_blocks: Sequence[int], block_size: int = 16) -> None:
        if not num_blocks or min(num_blocks) < 1:
            raise ConfigError(f"every cache group needs at least 1 KV block, not {list(num_blocks)}")
        if block_size < 1:
            raise ConfigError(f"a KV block must hold at least 1 token, not {block_size}")
        self._pools = tuple(BlockPool(n) for n in num_blocks)
        self._block_size = block_size

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_groups(self) -> int:
        return len(self._pools)

    @property
    def num_blocks(self) -> int:
        """Blocks that one sequence could hold in every group."""
        return min(pool.num_blocks for pool in self._pools)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be granted now in every group."""
        return min([pool.num_free_blocks for pool in self._pools])

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks, in each group, that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def grant(self, sequence: TokenSequence, num_blocks: int) -> tuple[list[int], ...]:
        """Append `num_blocks` blocks to the sequence's table of every group; the new ids, per group."""
        granted = tuple([pool.take(num_blocks) for pool in self._pools])
        if sequence.block_ids:
            for table, block_ids in zip(sequence.block_ids, granted, strict=True):
                table.extend(block_ids)
        else:
            sequence.block_ids = tuple([list(block_ids) for block_ids in granted])
        sequence.num_slots += num_blocks * self._block_size
        return granted

    def free(self, sequence: TokenSequence) -> None:
        """Take every block from the sequence."""
        for pool, table in zip(self._pools, sequence.block_ids, strict=bool(sequence.block_ids)):
            pool.give_back(table)
        sequence.block_ids = ()
        sequence.num_slots = 0

    def check_invariants(self, holders: Iterable[TokenSequence]) -> None:
        """Check that `holders` hold every block that is not free, each once, and have slots for what they computed.

        Raises AssertionError with the first violation.
        """
        held: list[list[int]] = [[] for _ in self._pools]
        for sequence in holders:
            name = f"sequence {sequence.sequence_id}"
            assert sequence.num_computed_tokens <= sequence.num_slots, f"{name}: computed tokens without a slot"
            assert len(sequence.block_ids) == len(self._pools), f"{name}: not one block table per cache group"
            for group, table in enumerate(sequence.block_ids):
                assert len(table) * self._block_size == sequence.num_slots, f"{name}: slots differ from its block table"
                held[group].extend(table)
        for pool, block_ids in zip(self._pools, held, strict=True):
            free_ids = pool.free_block_ids()
            assert len(set(block_ids)) == len(block_ids), "a block has two holders"
            assert free_ids.isdisjoint(block_ids), "a held block is free"
            assert len(free_ids) + len(block_ids) == pool.num_blocks, "a block is neither free nor held"
            assert pool.num_free_blocks == len(free_ids), "a block is free twice"
