"""Responses that can be retrieved, cancelled and gone on from: bounded in time, number and size. Knows no HTTP."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

from ropeway.server.conversation import ChatMessage
from ropeway.server.errors import UnknownRequestError
from ropeway.server.responses import LiveResponse
from ropeway.server.tenants import Caller

RETENTION_S = 3600.0
MAX_STORED = 1000
MAX_STORED_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class StoredResponse:
    """conversation: what was said up to the response, its instructions left out. num_bytes: of all that as JSON; the
    response itself counts when it has ended.
    """

    tenant: str
    live: LiveResponse
    conversation: tuple[ChatMessage, ...]
    stored_s: float
    num_bytes: int

    def continued(self) -> list[ChatMessage]:
        """The conversation with what was answered."""
        return [*self.conversation, *self.live.items.messages()]


class ResponseStore:
    """By id, oldest first; what is oldest goes when one of the bounds is passed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def put(self, response_id: str, live: LiveResponse, conversation: Sequence[ChatMessage], caller: Caller) -> None:
        num_bytes = len(orjson.dumps([message.model_dump() for message in conversation]))
        self._stored[response_id] = StoredResponse(caller.tenant, live, tuple(conversation), self._clock(), num_bytes)
        self._num_bytes += num_bytes
        self._forget_old()

    def on_ended(self, response_id: str) -> None:
        """Its size is known now."""
        stored = self._stored.get(response_id)
        if stored is not None:
            num_bytes = len(orjson.dumps(stored.live.object()))
            stored.num_bytes += num_bytes
            self._num_bytes += num_bytes
            self._forget_old()

    def find(self, response_id: str, caller: Caller) -> StoredResponse:
        """Raises UnknownRequestError, also where it is another tenant's."""
        self._forget_old()
        stored = self._stored.get(response_id)
        if stored is None or not caller.may_see(stored.tenant):
            raise UnknownRequestError(
                f"no response {response_id[:100]!r} is stored; they are kept for {RETENTION_S:g} s, the last "
                f"{MAX_STORED} at most"
            )
        return stored

    def delete(self, response_id: str, caller: Caller) -> None:
        """Forgets one. Raises as `find` does."""
        self.find(response_id, caller)
        self._drop(response_id)

    def discard(self, response_id: str) -> None:
        """Forgets one, if it is there."""
        if response_id in self._stored:
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._stored.pop(response_id).num_bytes

    def _forget_old(self) -> None:
        oldest_s = self._clock() - RETENTION_S
        while self._stored:
            response_id, oldest = next(iter(self._stored.items()))
            is_over = len(self._stored) > MAX_STORED or self._num_bytes > MAX_STORED_BYTES
            if oldest.stored_s >= oldest_s and not is_over:
                return
            self._drop(response_id)
