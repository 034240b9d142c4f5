"""When Python looks for cycles, in a process that serves. Knows nothing of what it serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# A step with 1,000 running makes 2,000 tuples that end with it. Python's own first threshold of 700 finds them alive
# three times a step, and takes them for reasons to walk everything that waits: 90 ms with 10,000 waiting requests.
THRESHOLDS = (20_000, 20, 20)


@contextmanager
def settled_garbage() -> Iterator[None]:
    """Leave what is loaded out of every collection, and collect rarely, as long as the context lasts."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()  # at exit the native parts are freed with the cycles that hold them
