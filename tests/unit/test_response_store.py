"""The bounds of what is stored of responses, on a clock of the test's own."""

from __future__ import annotations

from typing import Any

import pytest

from ropeway.server import response_store
from ropeway.server.conversation import ChatMessage
from ropeway.server.errors import UnknownRequestError
from ropeway.server.response_store import RETENTION_S, ResponseStore
from ropeway.server.tenants import Caller, KeyTerms

CALLER = Caller(KeyTerms(tenant="a"))


class Ended:
    """As much of a response as the store looks at."""

    def object(self) -> dict[str, Any]:
        return {"output": "x" * 1000}


def put(store: ResponseStore, name: str) -> None:
    store.put(name, Ended(), [ChatMessage(role="user", content="y" * 1000)], CALLER)  # type: ignore[arg-type]
    store.on_ended(name)


def test_time_number_and_size_bound_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    store = ResponseStore(lambda: now_s)
    put(store, "old")
    now_s = RETENTION_S
    put(store, "new")
    assert store.find("old", CALLER) and store.find("new", CALLER)
    now_s += 1
    with pytest.raises(UnknownRequestError, match="kept for 3600 s"):
        store.find("old", CALLER)
    monkeypatch.setattr(response_store, "MAX_STORED", 3)
    for number in range(4):
        put(store, f"r{number}")
    assert list(store._stored) == ["r1", "r2", "r3"]
    monkeypatch.setattr(response_store, "MAX_STORED_BYTES", 5000)
    put(store, "r4")
    assert list(store._stored) == ["r3", "r4"] and 4000 < store._num_bytes <= 5000
    store.delete("r3", CALLER)
    store.discard("r4")
    store.discard("r4")
    assert store._num_bytes == 0


def test_another_tenant_is_told_nothing() -> None:
    store = ResponseStore()
    put(store, "mine")
    stranger = Caller(KeyTerms(tenant="b"))
    for ask in (store.find, store.delete):
        with pytest.raises(UnknownRequestError):
            ask("mine", stranger)
    assert store.find("mine", Caller(None, is_admin=True))


def test_a_response_that_never_ends_counts_with_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_STORED_BYTES", 3000)
    store = ResponseStore()
    for number in range(4):
        said = [ChatMessage(role="user", content="y" * 1000)]
        store.put(f"r{number}", Ended(), said, CALLER)  # type: ignore[arg-type]
    assert list(store._stored) == ["r2", "r3"]
