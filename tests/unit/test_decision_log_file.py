"""The log on disk: whole when closed, bounded, and never a reason for serving to stop."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from ropeway.core.decision_log import CommitRecord, DecisionLog, FailRecord, Record
from ropeway.engine import decision_log_file
from ropeway.engine.decision_log_file import DecisionLogFile
from ropeway.errors import ConfigError
from support.stand_in import StandIn

MIB = 1 << 20


def read(path: Path) -> list[Record]:
    return list(DecisionLog(path.read_bytes()).records())


def test_what_was_put_is_on_disk_once_closed(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    log = DecisionLogFile(path, {"blocks": 5}, MIB)
    records: list[Record] = [CommitRecord(float(i), (i,)) for i in range(5_000)]
    for record in records:
        log.put(record)
    log.close()
    assert read(path) == records
    log.close()  # a second time does nothing
    assert DecisionLog(path.read_bytes()).header == {"blocks": 5}


def test_a_log_ends_before_its_bound_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.log"
    log = DecisionLogFile(path, {}, 1_000)
    for i in range(5_000):
        log.put(FailRecord(float(i)))
    log.close()
    assert path.stat().st_size <= 1_000 and not log.is_open
    assert read(path) == [FailRecord(float(i)) for i in range(len(read(path)))] and len(read(path)) > 50
    assert [r.levelno for r in caplog.records] == [logging.WARNING] and "bound of 1000 bytes" in caplog.text


def test_a_full_disk_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match="cannot write the decision log /dev/full: No space left"):
        DecisionLogFile(Path("/dev/full"), {}, MIB)


def test_a_disk_that_fills_up_later_ends_the_log_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = DecisionLogFile(tmp_path / "run.log", {}, MIB)
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(log, "_file", full)
        log.put(FailRecord(1.0))
        log.close()
    log.put(FailRecord(2.0))
    assert not log.is_open and caplog.text.count("No space left on device; serving goes on") == 1


def test_a_disk_slower_than_the_engine_ends_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decision_log_file, "MAX_QUEUED_RECORDS", 10)
    log = DecisionLogFile(tmp_path / "run.log", {}, MIB)
    is_stuck, goes_on = threading.Event(), threading.Event()

    class Slow(StandIn):
        def encode(self, record: Record) -> bytes:
            is_stuck.set()
            assert goes_on.wait(10)
            return self._original.encode(record)  # type: ignore[no-any-return]

    monkeypatch.setattr(log, "_encoder", Slow(log._encoder))
    log.put(FailRecord(0.0))
    assert is_stuck.wait(10)
    for i in range(20):
        log.put(FailRecord(float(i)))  # returns, though nothing is written
    assert not log.is_open and "wait for a slow disk" in caplog.text
    goes_on.set()
    log.close()


def test_a_file_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the decision log .*: No such file or directory"):
        DecisionLogFile(tmp_path / "missing" / "run.log", {}, MIB)
