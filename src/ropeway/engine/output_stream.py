"""The news of requests on the way to whoever reads them, on the event loop. Knows no engine, threads or HTTP.

A reader that stops taking holds up nobody: its stream only gathers, bounded by the tokens its requests may generate.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence

from ropeway.errors import RopewayError
from ropeway.outputs import Delta

DeltaSink = Callable[[list[Delta]], None]
# Ends a request, from any thread; with the cause where it is not the reader's own wish.
Abort = Callable[[str, RopewayError | None], None]


class OutputStream:
    """The deltas of one or several requests, in the order they came. One reader, on the event loop.

    Closing it (or leaving its `async with`) aborts what has not finished.
    The engine's side of it: `put`, `flush`, `accept`, `finish`, `fail`.
    """

    __slots__ = (
        "__weakref__",
        "_abort",
        "_deltas",
        "_error",
        "_is_closed",
        "_reader",
        "_reader_wants_end",
        "_unaccepted",
        "_unfinished",
        "_write",
        "_write_failure",
    )

    def __init__(self, request_ids: Sequence[str], abort: Abort) -> None:
        self._abort = abort
        self._unfinished = set(request_ids)
        self._unaccepted = set(request_ids)
        self._deltas: list[Delta] = []
        self._error: RopewayError | None = None
        self._is_closed = False
        # One reader waits at a time: a bare future costs half of what an asyncio.Event does, at every token.
        self._reader: asyncio.Future[None] | None = None
        self._reader_wants_end = False
        # While `pass_on` waits: what takes the news of a step at once, and what it raised.
        self._write: DeltaSink | None = None
        self._write_failure: Exception | None = None

    @property
    def is_finished(self) -> bool:
        """Every request has ended; deltas may still wait to be taken."""
        return not self._unfinished

    @property
    def is_whole(self) -> bool:
        """Every request has ended with an answer: no news will come, and no error."""
        return not self._unfinished and self._error is None

    async def wait_accepted(self) -> None:
        """Waits until the engine has taken every request: within a step. Raises the error of one that it refused."""
        while self._unaccepted and not self._is_over:
            await self._wait(wants_end=False)
        self._check_error()

    async def take(self) -> list[Delta]:
        """Waits for news and returns all of it; an empty list once everything has been taken or the stream was closed.

        Raises the error of a request that the engine refused, EngineStoppedError where the engine failed.
        """
        while not self._deltas:
            self._check_error()
            if self._is_over:
                return []
            await self._wait(wants_end=False)
        deltas, self._deltas = self._deltas, []
        return deltas

    async def take_all(self) -> list[Delta]:
        """Waits for the end and returns every delta not yet taken. Raises as `take` does."""
        while not self._is_over:
            await self._wait(wants_end=True)
        self._check_error()
        deltas, self._deltas = self._deltas, []
        return deltas

    async def pass_on(self, write: DeltaSink) -> None:
        """Hands all news to `write` until the end, or until the stream is closed.

        write: called on the event loop with what one step brought, straight from the step's one wake-up: a waiting
        task for each of many streams would cost more than the text.

        Raises as `take` does, and whatever `write` raises.
        """
        while True:
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                write(deltas)
                continue
            self._check_error()
            if self._is_over:
                return
            self._write = write
            try:
                await self._wait(wants_end=True)
            finally:
                self._write = None
            if self._write_failure is not None:
                try:
                    raise self._write_failure
                finally:
                    self._write_failure = None  # this frame is in its traceback

    def close(self, cause: RopewayError | None = None) -> None:
        """Aborts what has not finished and ends the stream; its blocks are free before the next step is planned."""
        if not self._is_closed:
            self._is_closed = True
            for request_id in self._unfinished:
                self._abort(request_id, cause)
            self._wake()

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._error is not None or not self._unfinished

    def _check_error(self) -> None:
        """Raises the error that ended it: a copy, whose traceback ends with whoever catches it. The stream is in the
        frames of that traceback, and would be in a circle with an error of its own.
        """
        if self._error is not None:
            raise copy.copy(self._error)

    async def _wait(self, *, wants_end: bool) -> None:
        assert self._reader is None, "a stream has one reader"
        self._reader = asyncio.get_running_loop().create_future()
        self._reader_wants_end = wants_end
        try:
            await self._reader
        finally:
            self._reader = None

    def put(self, delta: Delta) -> None:
        if not self._is_closed:
            self._deltas.append(delta)
            if not self._reader_wants_end:
                self._wake()

    def accept(self, request_id: str) -> None:
        self._unaccepted.discard(request_id)
        if not self._unaccepted and not self._reader_wants_end:
            self._wake()

    def flush(self) -> None:
        """Gives what a step brought to the writer that waits, if one does."""
        if self._write is None or not self._deltas:
            return
        deltas, self._deltas = self._deltas, []
        try:
            self._write(deltas)
        except Exception as failure:  # it is the reader's, not that of whoever delivers
            self._write_failure = failure
            self._write = None
            self._wake()

    def finish(self, request_id: str) -> None:
        self._unfinished.discard(request_id)
        if not self._unfinished:
            self._wake()

    def fail(self, request_id: str, error: RopewayError) -> None:
        self._error = self._error or error
        self._unfinished.discard(request_id)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
