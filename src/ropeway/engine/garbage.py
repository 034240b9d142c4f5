"""When Python looks for cycles, in a process that serves. Knows nothing of what it serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# What a step makes ends with it, yet Python's own first threshold of 700 collects about once a step with 1,000 running:
# that took 11 to 15 % of plan and commit. With 11,000 unfinished sequences a full collection takes 50 to 77 ms.
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
