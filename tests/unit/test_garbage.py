"""When Python looks for cycles while a server runs."""

from __future__ import annotations

import gc

from ropeway.engine.garbage import THRESHOLDS, settled_garbage


def test_collections_are_rare_within_and_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with settled_garbage():
        assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > 0 and gc.isenabled()
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_a_failure_within_leaves_them_as_before() -> None:
    before = gc.get_threshold()
    try:
        with settled_garbage():
            raise MemoryError
    except MemoryError:
        pass
    assert gc.get_threshold() == before
