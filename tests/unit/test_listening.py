"""How many connections may be open: what the limit of open files leaves."""

from __future__ import annotations

import logging
import resource

import pytest

from ropeway.errors import ConfigError
from ropeway.server import listening
from ropeway.server.listening import MAX_CONNECTIONS, NUM_OTHER_FILES, max_connections


def set_limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(listening.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(listening.resource, "setrlimit", lambda _, limits: raised.append(limits))
    return raised


def test_the_soft_limit_is_raised_and_leaves_room_for_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = set_limits(monkeypatch, 1024, 20_000)
    assert max_connections(None) == 20_000 - NUM_OTHER_FILES and raised == [(20_000, 20_000)]
    assert max_connections(50) == 50
    with pytest.raises(ConfigError, match="--max-connections 19900 needs 20028 open files, but .* 20000"):
        max_connections(19_900)


def test_a_low_hard_limit_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    set_limits(monkeypatch, 256, 256)
    with caplog.at_level(logging.WARNING):
        assert max_connections(None) == 128
    assert "may open 256 files" in caplog.text and "ulimit" in caplog.text


def test_without_a_limit_there_is_one_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert max_connections(None) == MAX_CONNECTIONS and max_connections(10**6) == 10**6
