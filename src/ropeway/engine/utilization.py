"""How well the engine's time is used: native work, what lies between native calls, waits for the interpreter lock.

Written by the engine thread after each turn; read by anyone, who may see a turn half counted. Knows no clock (times are
passed in) and nothing of what a machine can do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

WINDOW_S = 15.0  # what "now" means in the ratios: about one scrape
SNAPSHOT_S = 1.0
NUM_WAITS_KEPT = 2048


class CallMeter(Protocol):
    """A backend that counts: `NativeBackend`.

    take_calls: of each native call since it was asked last, (seconds without the interpreter lock, seconds until the
    lock was had again). work: (int8 multiply-adds, float32 multiply-adds, bytes read) since the start.
    """

    def take_calls(self) -> list[tuple[float, float]]: ...

    @property
    def work(self) -> tuple[int, int, int]: ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals at one moment, or over a span of time. now_s: of the moment, or the length of the span.

    step_s: turns of the engine thread in which it had work. native_s: the part of it in native calls, without the
    interpreter lock. lock_wait_s: the part of it that went by until calls had the lock again. num_rows: sequences
    running at the end of each turn, added up.
    """

    now_s: float = 0.0
    num_steps: int = 0
    num_rows: int = 0
    step_s: float = 0.0
    native_s: float = 0.0
    lock_wait_s: float = 0.0
    num_calls: int = 0
    int8_multiply_adds: int = 0
    f32_multiply_adds: int = 0
    bytes_read: int = 0

    def since(self, earlier: Usage) -> Usage:
        """What came to pass between two moments."""
        names = Usage.__slots__
        return Usage(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    @property
    def overhead_ratio(self) -> float:
        """Share of the steps' time outside native calls; 0 where there were none."""
        return 1.0 - self.native_s / self.step_s if self.step_s else 0.0


class Utilization:
    """Adds up turns. start_s: seconds of the clock that `on_turn` is given."""

    def __init__(self, meter: CallMeter, start_s: float) -> None:
        self._meter = meter
        self._num_steps = self._num_rows = self._num_calls = 0
        self._step_s = self._native_s = self._lock_wait_s = 0.0
        self._lock_waits_s: deque[float] = deque(maxlen=NUM_WAITS_KEPT)
        meter.take_calls()  # those of loading
        self._snapshots = deque([self.totals(start_s)])

    def on_turn(self, turn_s: float, num_running: int, now_s: float) -> None:
        """A turn with work ended at now_s after turn_s."""
        self._num_steps += 1
        self._num_rows += num_running
        self._step_s += turn_s
        for native_s, lock_wait_s in self._meter.take_calls():
            self._native_s += native_s
            self._lock_wait_s += lock_wait_s
            self._num_calls += 1
            self._lock_waits_s.append(lock_wait_s)
        if now_s - self._snapshots[-1].now_s >= SNAPSHOT_S:
            self._snapshots.append(self.totals(now_s))
            while self._snapshots[1].now_s < now_s - WINDOW_S:
                self._snapshots.popleft()

    def totals(self, now_s: float) -> Usage:
        """Everything since the start."""
        return Usage(
            now_s,
            self._num_steps,
            self._num_rows,
            self._step_s,
            self._native_s,
            self._lock_wait_s,
            self._num_calls,
            *self._meter.work,
        )

    def recent(self, now_s: float) -> Usage:
        """The last WINDOW_S seconds, or somewhat more where they began within a step or an idle time."""
        earlier = [snapshot for snapshot in list(self._snapshots) if snapshot.now_s <= now_s - WINDOW_S]
        start = earlier[-1] if earlier else self._snapshots[0]
        return self.totals(now_s).since(start)

    def lock_wait_quantiles_s(self, shares: Sequence[float]) -> list[float]:
        """Quantiles over the last NUM_WAITS_KEPT native calls, by nearest rank; zeros before the first call."""
        waits = sorted(self._lock_waits_s)
        if not waits:
            return [0.0] * len(shares)
        return [waits[min(len(waits) - 1, int(share * len(waits)))] for share in shares]
