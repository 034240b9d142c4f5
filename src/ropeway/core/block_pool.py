"""The KV blocks of one cache group: which are free. Knows no sequences; every operation is O(1) per block."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Hands out block ids 0..num_blocks-1. The block freed last is handed out first: its memory is the warmest."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free_ids = list(range(num_blocks - 1, -1, -1))
        self._is_held = bytearray(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_ids)

    def take(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks; the caller has checked that they can be had."""
        assert num_blocks <= len(self._free_ids), f"{num_blocks} blocks asked of {len(self._free_ids)}"
        block_ids = [self._free_ids.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._is_held[block_id] = 1
        return block_ids

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Return blocks; the first of them will be the first taken again."""
        for block_id in reversed(block_ids):
            assert self._is_held[block_id], f"block {block_id} freed twice"
            self._is_held[block_id] = 0
            self._free_ids.append(block_id)

    def free_block_ids(self) -> frozenset[int]:
        """Every free block, for the invariant checker."""
        return frozenset(self._free_ids)
