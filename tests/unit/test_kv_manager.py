"""Block pools and block tables."""

from __future__ import annotations

import pytest

from ropeway.core.admission import OptimisticAdmission, ReserveAdmission
from ropeway.core.block_pool import BlockPool
from ropeway.core.kv_manager import KVManager
from ropeway.core.prefix_index import TokenHasher
from ropeway.core.sequence import Sequence
from ropeway.errors import ConfigError
from support.scheduling import make_request


def test_the_pool_hands_out_each_block_once_and_the_warmest_first() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2] and pool.num_free_blocks == 1
    pool.give_back([1, 0])
    assert pool.take(3) == [1, 0, 3] and pool.num_free_blocks == 0


def test_the_pool_refuses_our_own_mistakes() -> None:
    pool = BlockPool(2)
    held = pool.take(1)
    with pytest.raises(AssertionError, match="2 blocks asked of 1"):
        pool.take(2)
    pool.give_back(held)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give_back(held)


def test_grants_append_to_the_table_of_each_group_and_free_takes_all() -> None:
    kv = KVManager([4, 6], block_size=4)
    sequence = Sequence(0, make_request("a", 9, 3), 0)
    kv.board(sequence, 9)
    assert sequence.block_ids == ([0, 1, 2], [0, 1, 2])
    assert kv.grant_each([sequence]) == [((3,), (3,))]
    assert sequence.block_ids == ([0, 1, 2, 3],) * 2 and sequence.num_slots == 16
    assert (kv.num_groups, kv.num_blocks, kv.num_free_blocks) == (2, 4, 0)
    kv.check_invariants([sequence])
    kv.free(sequence)
    assert (kv.num_free_blocks, sequence.block_ids, sequence.num_slots) == (4, (), 0)
    kv.free(sequence)  # holds nothing: nothing happens
    kv.check_invariants([])


def test_only_a_manager_with_a_hasher_shares() -> None:
    assert not KVManager([4]).shares_blocks and KVManager([4], 16, TokenHasher(16)).shares_blocks


def test_blocks_for_tokens() -> None:
    kv = KVManager([9], block_size=4)
    assert [kv.num_blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(("num_blocks", "block_size"), [([], 4), ([0], 4), ([3, 0], 4), ([3], 0)])
def test_a_pool_or_block_of_nothing_is_refused(num_blocks: list[int], block_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KVManager(num_blocks, block_size)


def test_admissions() -> None:
    kv = KVManager([4], block_size=4)
    sequence = Sequence(0, make_request("a", 9, 5), 0)
    assert OptimisticAdmission().num_slots(sequence) == 9 and ReserveAdmission().num_slots(sequence) == 14
    assert OptimisticAdmission(1).may_board(sequence, kv) and ReserveAdmission().may_board(sequence, kv)
    assert not OptimisticAdmission(2).may_board(sequence, kv)
    kv.board(Sequence(1, make_request("b", 1, 1), 0), 1)
    assert OptimisticAdmission().may_board(sequence, kv) and not ReserveAdmission().may_board(sequence, kv)
    with pytest.raises(ConfigError, match="watermark"):
        OptimisticAdmission(-1)
