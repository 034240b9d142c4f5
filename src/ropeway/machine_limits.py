"""What this machine can do at most, measured: multiply-adds per second on its ports, bytes read per second.

Owns the measuring and the choice of when to: a server measures only while it has nothing to do, in slices that a
request waits for at most once. Knows nothing of models, engines or HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ropeway import _native

logger = logging.getLogger(__name__)

PEAK_SLICE_S = 0.01
NUM_PEAK_SLICES = 8
READ_SLICE_S = 0.03
NUM_READ_SLICES = 3
READ_BYTES = 96 << 20  # more than the last-level caches of the machines we know give to one process
PAUSE_S = 0.02  # between slices: lets a request that arrived be noticed


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Of `num_threads` at once, with one instruction set. Multiply-add rates of scalar code are not known: None."""

    num_threads: int
    int8_per_s: float | None
    f32_per_s: float | None
    read_bytes_per_s: float

    def arithmetic_s(self, int8_multiply_adds: int, f32_multiply_adds: int) -> float | None:
        """The least time that so many multiply-adds take, seconds; None where the rates are unknown."""
        if self.int8_per_s is None or self.f32_per_s is None:
            return None
        return int8_multiply_adds / self.int8_per_s + f32_multiply_adds / self.f32_per_s

    def read_s(self, num_bytes: int) -> float:
        """The least time that reading so many bytes takes, seconds."""
        return num_bytes / self.read_bytes_per_s


class LimitsMeter:
    """Measures slice by slice. Each rate is the best of its slices: whatever disturbs one makes it slower."""

    def __init__(self, num_threads: int, isa: str) -> None:
        self._isa = isa
        self._pool = _native.ThreadPool(num_threads)
        self._slices = self._planned()
        self._best = {"int8": 0.0, "f32": 0.0, "read": 0.0}
        self._has_peaks = isa != "scalar"

    def _planned(self) -> list[str]:
        return [*["int8", "f32"] * NUM_PEAK_SLICES, *["read"] * NUM_READ_SLICES]

    @property
    def limits(self) -> MachineLimits | None:
        """None until every slice has been measured."""
        if self._slices:
            return None
        int8_per_s, f32_per_s = (self._best[name] if self._has_peaks else None for name in ("int8", "f32"))
        return MachineLimits(self._pool.num_threads, int8_per_s, f32_per_s, self._best["read"])

    def measure_slice(self) -> None:
        """Keeps every thread busy for a few hundredths of a second."""
        name = self._slices.pop()
        if name == "read":
            rate = _native.read_bytes_per_s(self._pool, READ_BYTES, READ_SLICE_S)
        elif not self._has_peaks:
            return
        elif name == "int8":
            rate = _native.peak_int8_per_s(self._pool, PEAK_SLICE_S, self._isa)
        else:
            rate = _native.peak_f32_per_s(self._pool, PEAK_SLICE_S, self._isa)
        self._best[name] = max(self._best[name], rate)


def measure_limits(num_threads: int, isa: str) -> MachineLimits:
    """The limits, measured now: about half a second."""
    meter = LimitsMeter(num_threads, isa)
    while (limits := meter.limits) is None:
        meter.measure_slice()
    return limits


class IdleLimits:
    """The limits, measured in the background the first time they are asked for while there is nothing else to do.

    isa: the instruction set that the work uses.
    is_idle: whether nothing runs that measuring would disturb, or be disturbed by; called from another thread.
    """

    def __init__(self, num_threads: int, isa: str, is_idle: Callable[[], bool]) -> None:
        self._meter = LimitsMeter(num_threads, isa)
        self._is_idle = is_idle
        self._thread: threading.Thread | None = None
        self._limits: MachineLimits | None = None
        self._is_closed = False

    def close(self) -> None:
        """Measures nothing further; what is being measured ends with its slice."""
        self._is_closed = True

    def ask(self) -> MachineLimits | None:
        """The limits if they are known; otherwise None, and measuring goes on if it can."""
        is_measuring = self._thread is not None and self._thread.is_alive()
        if self._limits is None and not is_measuring and not self._is_closed and self._is_idle():
            # No daemon: the end of the interpreter must not cut a native call short.
            self._thread = threading.Thread(target=self._measure, name="ropeway-limits")
            self._thread.start()
        return self._limits

    def _measure(self) -> None:
        while self._limits is None and not self._is_closed and self._is_idle():
            self._meter.measure_slice()
            self._limits = self._meter.limits
            time.sleep(PAUSE_S)
        if self._limits is not None:
            logger.info("measured this machine: %s", self._limits)
