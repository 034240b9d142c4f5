"""Block tables: which sequence holds which KV blocks, in every cache group, and what of them others may share.

Knows no queues, budgets or policies. Whoever asks for blocks checks `num_free_blocks` first; a block that only the
prefix cache knows is free, and is evicted in here when it is granted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from ropeway.core.block_pool import BlockPool
from ropeway.core.params import Request
from ropeway.core.plan import BlockCopies
from ropeway.core.prefix_index import NOTHING_CACHED, BlockHasher, PrefixMatch
from ropeway.core.sequence import Sequence as TokenSequence
from ropeway.errors import ConfigError


class KVManager:
    """The block pools of a model, one per cache group.

    num_blocks: blocks of each group. block_size: tokens per block. hasher: of full blocks, so that sequences can share
    them; None shares nothing. Every group keeps every position, so a sequence holds equally many blocks in each.

    Raises ConfigError for a pool or a block that holds nothing.
    """

    def __init__(self, num_blocks: Sequence[int], block_size: int = 16, hasher: BlockHasher | None = None) -> None:
        if not num_blocks or min(num_blocks) < 1:
            raise ConfigError(f"every cache group needs at least 1 KV block, not {list(num_blocks)}")
        if block_size < 1:
            raise ConfigError(f"a KV block must hold at least 1 token, not {block_size}")
        self._pools = tuple(BlockPool(n) for n in num_blocks)
        self._block_size = block_size
        self._hasher = hasher
        self._hashed: tuple[Request, list[bytes]] | None = None  # the prompt hashed last: its other sequences follow
        self._frontiers: dict[bytes, TokenSequence] = {}  # hash of a block -> who is computing it
        self._copies: list[tuple[list[int], list[int]]] = [([], []) for _ in num_blocks]  # (from, to), per group
        self.num_prefix_queries = 0  # prompt tokens of those who boarded for the first time
        self.num_prefix_hits = 0  # of them, those found cached

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def shares_blocks(self) -> bool:
        """Whether full blocks are hashed and offered to others."""
        return self._hasher is not None

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

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, of the free ones, whose tokens can still be shared."""
        return min([pool.index.num_parked for pool in self._pools])

    @property
    def num_evicted_blocks(self) -> int:
        """Blocks that were cached and then granted for other tokens, since the start."""
        return max([pool.num_evicted_blocks for pool in self._pools])

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks, in each group, that hold `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    # -- boarding ------------------------------------------------------------------------------------------------------

    def match(self, sequence: TokenSequence, siblings: Iterable[TokenSequence] = ()) -> None:
        """Note, as its match, what a sequence without blocks would find cached; one token at least is left to compute.

        siblings: of the same request; one whose prompt is computed lends the last, incomplete block of it too.
        """
        if self._hasher is None:
            return
        self._hash_prompt(sequence, self._hasher)
        if sequence.request.skips_prefix_cache:
            return
        tables = [pool.index.find(sequence.block_hashes) for pool in self._pools]
        num_blocks = min(map(len, tables))
        num_tokens = num_blocks * self._block_size
        last_ids: tuple[int, ...] = ()
        if num_tokens >= sequence.num_tokens:
            num_blocks, num_tokens = num_blocks - 1, sequence.num_tokens - 1
            last_ids = tuple([table[num_blocks] for table in tables])
        elif lender := self._lender(sequence, num_blocks, siblings):
            num_tokens = sequence.num_tokens - 1
            last_ids = tuple([table[num_blocks] for table in lender.block_ids])
        if num_tokens == num_blocks * self._block_size:
            last_ids = ()
        shared = tuple([table[:num_blocks] for table in tables])
        num_held = min([pool.num_held(table) for pool, table in zip(self._pools, shared, strict=True)])
        sequence.match = PrefixMatch(num_tokens, num_blocks, num_held, shared, last_ids)

    def _lender(
        self, sequence: TokenSequence, num_blocks: int, siblings: Iterable[TokenSequence]
    ) -> TokenSequence | None:
        """A sibling that holds the rest of the prompt, where `num_blocks` full blocks and a part are all of it."""
        if sequence.num_generated_tokens or num_blocks < (sequence.num_tokens - 1) // self._block_size:
            return None
        # One that has sampled since it boarded has computed all that it then knew.
        return next((s for s in siblings if s.block_ids and s.num_tokens > s.num_prefill_tokens), None)

    def num_blocks_to_take(self, sequence: TokenSequence, num_tokens: int) -> int:
        """Free blocks, of each group, that a sequence needs for `num_tokens` tokens when it boards with its match."""
        return self.num_blocks_for(num_tokens) - sequence.match.num_held_blocks

    def num_blocks_freed(self, victims: Iterable[TokenSequence], newcomer: TokenSequence) -> Iterator[int]:
        """How many more free blocks one that was matched would have without each of these, and those before it.

        What others hold too is not free then, and what the newcomer would share of it was not to be taken before.
        """
        if self._hasher is None:
            for victim in victims:
                yield len(victim.block_ids[0])
            return
        tables = newcomer.match.block_ids or tuple([[] for _ in self._pools])
        num_left = [  # holders of each block, the newcomer among them
            {block_id: pool.num_holders(block_id) + 1 for block_id in table}
            for pool, table in zip(self._pools, tables, strict=True)
        ]
        for victim in victims:
            num_freed = []
            for pool, table, num_holders in zip(self._pools, victim.block_ids, num_left, strict=True):
                for block_id in table:
                    num_holders[block_id] = num_holders.get(block_id, pool.num_holders(block_id)) - 1
                num_freed.append(sum([not num_holders[block_id] for block_id in table]))
            yield min(num_freed)

    def board(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Give a sequence without blocks its table, for `num_tokens` tokens, with what its match, made just now, found.

        `num_blocks_to_take` have been seen to be free.
        """
        match, sequence.match = sequence.match, NOTHING_CACHED
        num_blocks = self.num_blocks_for(num_tokens)
        tables = tuple([list(table) for table in match.block_ids]) or tuple([[] for _ in self._pools])
        for group, (pool, table) in enumerate(zip(self._pools, tables, strict=True)):
            pool.hold(table)
            last_id = match.last_ids[group] if match.last_ids else None
            if last_id is not None and not pool.is_held(last_id):
                pool.adopt(last_id)
                table.append(last_id)
                last_id = None
            table += pool.take(num_blocks - len(table))
            if last_id is not None:
                source_ids, destination_ids = self._copies[group]
                source_ids.append(last_id)
                destination_ids.append(table[match.num_blocks])
        sequence.block_ids = tables
        sequence.is_announced = False
        sequence.num_slots = num_blocks * self._block_size
        sequence.num_computed_tokens = match.num_tokens
        sequence.num_published_blocks = match.num_blocks
        self._set_frontier(sequence)
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = match.num_tokens
            self.num_prefix_queries += sequence.num_prompt_tokens if self._hasher else 0
            self.num_prefix_hits += match.num_tokens

    def take_copies(self) -> tuple[BlockCopies, ...]:
        """What is to be copied before the next forward pass, per group, once; empty where nothing is."""
        if not self._copies[0][0] and not any([source_ids for source_ids, _ in self._copies]):
            return ()
        copies = tuple([BlockCopies(tuple(source_ids), tuple(ids)) for source_ids, ids in self._copies])
        self._copies = [([], []) for _ in self._pools]
        return copies

    def leader(self, sequence: TokenSequence) -> TokenSequence | None:
        """Who is computing the first block that a matched sequence did not find cached."""
        num_blocks, hashes = sequence.match.num_blocks, sequence.block_hashes
        if num_blocks >= len(hashes) or sequence.request.skips_prefix_cache:
            return None
        return self._frontiers.get(hashes[num_blocks])

    def num_shared_blocks(self, a: TokenSequence, b: TokenSequence) -> int:
        """Full blocks of known tokens that two sequences have in common, from the first on."""
        hashes_a, hashes_b = a.block_hashes, b.block_hashes
        # A hash stands for every block up to its own, so equality ends once.
        num_blocks = min(len(hashes_a), len(hashes_b))
        return bisect_left(range(num_blocks), True, key=lambda block: hashes_a[block] != hashes_b[block])

    # -- running -------------------------------------------------------------------------------------------------------

    def grant_each(self, sequences: Sequence[TokenSequence]) -> list[tuple[tuple[int], ...]]:
        """Append one block to each sequence's table of every group; of each, the new id per group."""
        columns = [pool.take(len(sequences)) for pool in self._pools]
        for group, block_ids in enumerate(columns):
            for sequence, block_id in zip(sequences, block_ids, strict=True):
                sequence.block_ids[group].append(block_id)
        for sequence in sequences:
            sequence.num_slots += self._block_size
        return list(zip(*[zip(block_ids, strict=True) for block_ids in columns], strict=True))

    def num_tokens_to_attend(self, sequence: TokenSequence) -> int:
        """With how many known tokens a sequence that decodes next fills a block, needs one, or ends.

        One that it needs already it gets before then.
        """
        num_slots = sequence.num_slots
        due = num_slots + 1 if sequence.num_tokens <= num_slots else num_slots + self._block_size + 1
        if self._hasher is not None:
            due = min(due, sequence.num_tokens_to_seal)
        return min(due, sequence.max_num_tokens)

    def seal(self, sequence: TokenSequence) -> None:
        """Hash and offer the block that is full; its tokens, and one more, are the sequence's tail, and it is computed.

        Due when num_tokens reaches num_tokens_to_seal: the token behind a block is known once the block is computed.
        """
        tail, hashes, block_size = sequence.tail_token_ids, sequence.block_hashes, self._block_size
        assert self._hasher is not None and len(tail) == block_size + 1
        last_token_id = tail.pop()
        block, block_hash = len(hashes), self._hasher.next_hash(sequence.request, hashes[-1] if hashes else None, tail)
        hashes.append(block_hash)
        sequence.tail_token_ids = array("i", (last_token_id,))
        sequence.num_tokens_to_seal += block_size
        assert sequence.num_published_blocks == block, "one that decodes has offered what it prefilled"
        for pool, table in zip(self._pools, sequence.block_ids, strict=True):
            pool.publish(table[block], block_hash)
        sequence.num_published_blocks = block + 1

    def publish(self, sequence: TokenSequence) -> None:
        """Offer the full blocks that a running sequence has computed, once the step that did so has succeeded."""
        hashes = sequence.block_hashes
        first, end = sequence.num_published_blocks, min(sequence.num_computed_tokens // self._block_size, len(hashes))
        if end <= first:
            return
        self._clear_frontier(sequence)
        for pool, table in zip(self._pools, sequence.block_ids, strict=True):
            for block in range(first, end):
                pool.publish(table[block], hashes[block])
        sequence.num_published_blocks = end
        self._set_frontier(sequence)

    def free(self, sequence: TokenSequence) -> None:
        """Take every block from the sequence."""
        self._clear_frontier(sequence)
        for pool, table in zip(self._pools, sequence.block_ids, strict=bool(sequence.block_ids)):
            pool.give_back(table)
        sequence.block_ids = ()
        sequence.num_slots = 0
        sequence.num_published_blocks = 0

    def check_invariants(self, holders: Iterable[TokenSequence]) -> None:
        """Check that `holders` hold every block that is not free, and have slots for what they computed.

        Raises AssertionError with the first violation.
        """
        held: list[list[int]] = [[] for _ in self._pools]
        holders = list(holders)
        for sequence in holders:
            name = f"sequence {sequence.sequence_id}"
            assert sequence.num_computed_tokens <= sequence.num_slots, f"{name}: computed tokens without a slot"
            assert len(sequence.block_ids) == len(self._pools), f"{name}: not one block table per cache group"
            num_published = sequence.num_published_blocks * self._block_size
            assert num_published <= sequence.num_computed_tokens, f"{name}: offers what is not computed"
            for group, table in enumerate(sequence.block_ids):
                assert len(table) * self._block_size == sequence.num_slots, f"{name}: slots differ from its block table"
                assert len(set(table)) == len(table), f"{name} holds a block twice"
                held[group].extend(table)
                index = self._pools[group].index
                for block_id in table[sequence.num_published_blocks :]:
                    assert not index.has_hash(block_id), f"{name} may write to block {block_id}, which is shared"
        for pool, block_ids in zip(self._pools, held, strict=True):
            pool.check_invariants(block_ids)
        for frontier, sequence in self._frontiers.items():
            assert sequence in holders, f"sequence {sequence.sequence_id} leads without blocks"
            assert sequence.block_hashes[sequence.num_published_blocks] == frontier, "a frontier was left behind"

    # -- hashes -------------------------------------------------------------------------------------------------------

    def _hash_prompt(self, sequence: TokenSequence, hasher: BlockHasher) -> None:
        """Hash the prompt's blocks, once."""
        if sequence.num_tokens_to_seal:
            return
        request = sequence.request
        if self._hashed is None or self._hashed[0] is not request:
            self._hashed = (request, hasher.prompt_hashes(request))
        sequence.block_hashes = list(self._hashed[1])
        tail = request.prompt_token_ids[len(sequence.block_hashes) * self._block_size :]
        sequence.tail_token_ids = array("i", tail)
        sequence.num_tokens_to_seal = (len(sequence.block_hashes) + 1) * self._block_size + 1

    def _set_frontier(self, sequence: TokenSequence) -> None:
        if sequence.num_published_blocks < len(sequence.block_hashes):
            self._frontiers.setdefault(sequence.block_hashes[sequence.num_published_blocks], sequence)

    def _clear_frontier(self, sequence: TokenSequence) -> None:
        if sequence.num_published_blocks < len(sequence.block_hashes):
            block_hash = sequence.block_hashes[sequence.num_published_blocks]
            if self._frontiers.get(block_hash) is sequence:
                del self._frontiers[block_hash]
