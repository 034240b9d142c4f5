"""How the engine's time is accounted for, from turns and calls with made-up lengths."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from ropeway import _native, machine_limits
from ropeway.engine.utilization import NUM_WAITS_KEPT, WINDOW_S, Utilization
from ropeway.machine_limits import IdleLimits, LimitsMeter, MachineLimits, measure_limits


class FakeMeter:
    """Calls are handed in; every call does one multiply-add of each kind and reads ten bytes."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []
        self.num_calls = 0

    def take_calls(self) -> list[tuple[float, float]]:
        calls, self.calls = self.calls, []
        self.num_calls += len(calls)
        return calls

    @property
    def work(self) -> tuple[int, int, int]:
        return self.num_calls, 2 * self.num_calls, 10 * self.num_calls


def test_totals_split_a_turn_into_native_and_the_rest() -> None:
    meter = FakeMeter()
    utilization = Utilization(meter, start_s=100.0)
    meter.calls = [(0.6, 0.001), (0.2, 0.003)]
    utilization.on_turn(1.0, num_running=4, now_s=101.0)
    total = utilization.totals(101.0)
    assert (total.num_steps, total.num_rows, total.num_calls) == (1, 4, 2)
    assert total.native_s == pytest.approx(0.8) and total.lock_wait_s == pytest.approx(0.004)
    assert total.overhead_ratio == pytest.approx(0.2)
    assert (total.int8_multiply_adds, total.f32_multiply_adds, total.bytes_read) == (2, 4, 20)


def test_calls_made_while_loading_do_not_count() -> None:
    meter = FakeMeter()
    meter.calls = [(5.0, 1.0)]
    utilization = Utilization(meter, start_s=0.0)
    assert utilization.totals(1.0).native_s == 0
    assert utilization.recent(1.0).int8_multiply_adds == 0
    assert utilization.recent(1.0).overhead_ratio == 0


def test_recent_forgets_what_lies_before_the_window() -> None:
    meter = FakeMeter()
    utilization = Utilization(meter, start_s=0.0)
    for second in range(1, 41):
        meter.calls = [(0.5 if second <= 20 else 0.9, 0.0)]
        utilization.on_turn(1.0, num_running=1, now_s=float(second))
    recent = utilization.recent(40.0)
    assert recent.now_s == pytest.approx(WINDOW_S) and recent.num_steps == WINDOW_S
    assert recent.overhead_ratio == pytest.approx(0.1)
    assert utilization.totals(40.0).overhead_ratio == pytest.approx(0.3)


def test_an_idle_time_is_part_of_the_recent_span() -> None:
    meter = FakeMeter()
    utilization = Utilization(meter, start_s=0.0)
    meter.calls = [(1.0, 0.0)]
    utilization.on_turn(1.0, num_running=1, now_s=1.0)
    recent = utilization.recent(101.0)
    assert recent.now_s >= WINDOW_S and recent.step_s == 0


def test_lock_wait_quantiles_are_of_the_newest_calls() -> None:
    meter = FakeMeter()
    utilization = Utilization(meter, start_s=0.0)
    assert utilization.lock_wait_quantiles_s((0.5, 0.99)) == [0.0, 0.0]
    meter.calls = [(0.0, 9.0)] * 10 + [(0.0, wait / NUM_WAITS_KEPT) for wait in range(NUM_WAITS_KEPT)]
    utilization.on_turn(1.0, num_running=1, now_s=1.0)
    assert utilization.lock_wait_quantiles_s((0.5, 0.99)) == pytest.approx([0.5, 0.99], abs=0.001)


def test_limits_turn_work_into_the_least_time() -> None:
    limits = MachineLimits(2, int8_per_s=100.0, f32_per_s=50.0, read_bytes_per_s=10.0)
    assert limits.arithmetic_s(200, 50) == 3.0 and limits.read_s(5) == 0.5
    assert MachineLimits(2, None, None, 10.0).arithmetic_s(1, 1) is None


def test_limits_are_measured_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine_limits, "NUM_PEAK_SLICES", 1)
    limits = measure_limits(1, _native.supported_isas()[0])
    assert limits.read_bytes_per_s > 1e8
    if limits.int8_per_s is not None and limits.f32_per_s is not None:
        assert limits.int8_per_s > limits.f32_per_s > 1e8


@pytest.mark.parametrize("peak", [_native.peak_int8_per_s, _native.peak_f32_per_s])
def test_peaks_are_those_of_an_instruction_set(peak: Callable[..., float]) -> None:
    pool = _native.ThreadPool(1)
    rates = {isa: peak(pool, 0.01, isa) for isa in _native.supported_isas() if isa != "scalar"}
    assert all(rate > 1e8 for rate in rates.values())
    with pytest.raises(ValueError, match="'scalar'"):
        peak(pool, 0.01, "scalar")


def test_idle_limits_stop_when_work_comes_and_go_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = threading.Semaphore(0)
    is_idle = False

    def measure_slice(self: LimitsMeter) -> None:
        nonlocal is_idle
        self._slices.pop()
        self._best["read"] = 1.0
        is_idle = False  # a request arrives during every slice
        measured.release()

    monkeypatch.setattr(LimitsMeter, "measure_slice", measure_slice)
    monkeypatch.setattr(machine_limits, "PAUSE_S", 0.0)
    limits = IdleLimits(1, "scalar", lambda: is_idle)
    assert limits.ask() is None and not measured.acquire(timeout=0.05)
    num_slices = len(LimitsMeter(1, "scalar")._slices)
    for _ in range(num_slices):
        while limits._thread is not None and limits._thread.is_alive():
            time.sleep(0.001)
        is_idle = True
        limits.ask()
        assert measured.acquire(timeout=5)
    assert limits._thread is not None
    limits._thread.join()
    found = limits.ask()
    assert found is not None and found.read_bytes_per_s == 1.0


def test_closed_limits_measure_nothing() -> None:
    limits = IdleLimits(1, "scalar", lambda: True)
    limits.close()
    assert limits.ask() is None and limits._thread is None
