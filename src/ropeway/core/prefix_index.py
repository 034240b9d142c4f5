"""Which block of a pool holds which tokens, by hash. Knows no sequences, holders or queues.

A full block's hash is chained through every block before it, so equal hashes mean equal prefixes. The chain starts from
the tenant and its salt: nobody can find out by timing what another tenant has asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack
from typing import Protocol

from ropeway.core.params import Request

HASH_BYTES = 32
TOKEN_BYTES = array("i").itemsize


class BlockHasher(Protocol):
    """Names full blocks. A recorded run is replayed with one that repeats the names that were given."""

    def prompt_hashes(self, request: Request) -> list[bytes]:
        """One hash per full block of the prompt."""

    def next_hash(self, request: Request, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        """The hash of a full block after that with the hash `parent`, or of a first block."""


class TokenHasher:
    """The BlockHasher that hashes tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def prompt_hashes(self, request: Request) -> list[bytes]:
        data = _as_bytes(request.prompt_token_ids)
        step = self._block_size * TOKEN_BYTES
        block_hash = self._root(request)
        hashes = []
        for end in range(step, len(data) + 1, step):
            block_hash = blake2b(block_hash + data[end - step : end], digest_size=HASH_BYTES).digest()
            hashes.append(block_hash)
        return hashes

    def next_hash(self, request: Request, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        return blake2b(
            (parent or self._root(request)) + array("i", token_ids).tobytes(), digest_size=HASH_BYTES
        ).digest()

    def _root(self, request: Request) -> bytes:
        terms = request.terms
        tenant, salt = terms.tenant.encode("utf-8", "surrogatepass"), terms.cache_salt.encode("utf-8", "surrogatepass")
        # The length keeps ("ab", "c") apart from ("a", "bc"); `person` keeps roots apart from blocks.
        return blake2b(b"%d:" % len(tenant) + tenant + salt, digest_size=HASH_BYTES, person=b"tenant and salt").digest()


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    return pack(f"{len(token_ids)}i", *token_ids)  # half of what an array takes to make


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What of a sequence's known tokens is cached.

    block_ids: per group, the full blocks it would share, equally many. last_ids: per group, the block that holds what
    else is cached, up to num_tokens; it will write behind that, so it needs that block to itself: a copy, or the block
    where nobody holds it. num_held_blocks: of those to be shared, how many are held by others, so that sharing them
    takes nothing from the free ones.
    """

    num_tokens: int = 0
    num_blocks: int = 0
    num_held_blocks: int = 0
    block_ids: tuple[list[int], ...] = ()
    last_ids: tuple[int, ...] = ()


NOTHING_CACHED = PrefixMatch()


class PrefixIndex:
    """The hashes of a pool's blocks, and the order in which unheld ones are evicted: least recently held first.

    A block is *parked* while it has a hash and no holder. Parked blocks form a ring through an entry of its own, oldest
    first; links lie in two arrays, so that each operation is O(1) and a block costs some 160 bytes, its pool's too.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._ring = num_blocks  # the entry that is no block: its newer is the oldest block, its older the newest
        self._older = array("i", range(num_blocks + 1))  # a block that is not parked is linked to itself
        self._newer = array("i", range(num_blocks + 1))
        self.num_parked = 0

    def __len__(self) -> int:
        return len(self._block_of)

    def get(self, block_hash: bytes) -> int | None:
        """The block of that hash."""
        return self._block_of.get(block_hash)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that are all here."""
        block_of, found = self._block_of, []
        for block_hash in hashes:
            block_id = block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def has_hash(self, block_id: int) -> bool:
        return self._hash_of[block_id] is not None

    def insert(self, block_hash: bytes, block_id: int) -> None:
        """Give a held block a hash that no block has."""
        assert block_hash not in self._block_of and self._hash_of[block_id] is None, f"block {block_id} has a hash"
        self._block_of[block_hash] = block_id
        self._hash_of[block_id] = block_hash

    def remove(self, block_id: int) -> None:
        """Forget what a block holds."""
        block_hash = self._hash_of[block_id]
        assert block_hash is not None, f"block {block_id} has no hash"
        del self._block_of[block_hash]
        self._hash_of[block_id] = None

    def park(self, block_ids: Sequence[int]) -> list[int]:
        """Nobody holds these any more: the last to be evicted, in this order. Returns those without a hash, not parked.

        All at once, because a sequence that ends gives dozens back.
        """
        ring, older, newer, hash_of = self._ring, self._older, self._newer, self._hash_of
        newest, blank_ids = older[ring], []
        for block_id in block_ids:
            if hash_of[block_id] is None:
                blank_ids.append(block_id)
                continue
            older[block_id], newer[newest] = newest, block_id
            newest = block_id
        newer[newest], older[ring] = ring, newest
        self.num_parked += len(block_ids) - len(blank_ids)
        return blank_ids

    def unpark(self, block_id: int) -> None:
        """It is held again, or to be forgotten."""
        older, newer = self._older, self._newer
        before, after = older[block_id], newer[block_id]
        assert before != block_id, f"block {block_id} is not parked"
        newer[before], older[after] = after, before
        older[block_id] = newer[block_id] = block_id
        self.num_parked -= 1

    def evict(self, num_blocks: int) -> list[int]:
        """Forget the blocks that were parked first, and hand them over."""
        assert num_blocks <= self.num_parked, f"{num_blocks} blocks to be evicted of {self.num_parked}"
        ring, older, newer, hash_of, block_of = self._ring, self._older, self._newer, self._hash_of, self._block_of
        block_ids, block_id = [], newer[ring]
        for _ in range(num_blocks):
            block_ids.append(block_id)
            next_id = newer[block_id]
            older[block_id] = newer[block_id] = block_id
            block_hash = hash_of[block_id]
            assert block_hash is not None, f"block {block_id} has no hash"
            del block_of[block_hash]
            hash_of[block_id] = None
            block_id = next_id
        newer[ring], older[block_id] = block_id, ring
        self.num_parked -= num_blocks
        return block_ids

    def parked_block_ids(self) -> list[int]:
        """Every parked block, the next to be evicted first; for the invariant checker."""
        block_ids = []
        block_id = self._newer[self._ring]
        while block_id != self._ring:
            block_ids.append(block_id)
            block_id = self._newer[block_id]
        return block_ids

    def check_invariants(self) -> None:
        """Check that hashes and blocks agree. Raises AssertionError with the first violation."""
        known = {block_hash: block_id for block_id, block_hash in enumerate(self._hash_of) if block_hash is not None}
        assert known == self._block_of, "hashes and blocks differ"
        assert len(self.parked_block_ids()) == self.num_parked, "parked blocks are miscounted"
