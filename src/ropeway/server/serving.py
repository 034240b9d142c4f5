"""Running the application on a socket: address, signals, orderly shutdown. Knows nothing of JSON or models.

The first SIGTERM or SIGINT closes the door, lets what runs finish within the timeout, then aborts the rest, each with a
proper end of its stream. A second signal ends the process's work at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import uvicorn

from ropeway.errors import ConfigError
from ropeway.llm import AsyncLLM
from ropeway.server.app import create_app
from ropeway.server.batch_service import BatchService
from ropeway.server.config import ServerConfig
from ropeway.server.connections import BoundedConnection, ConnectionLimits
from ropeway.server.hangups import Hangups
from ropeway.server.tenants import KeyRing, load_key_file
from ropeway.server.tls import TlsContext
from ropeway.server.tracing import RequestTraces
from ropeway.server.traffic import Traffic

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# After aborting, the ends of the streams still have to be written to clients, some of whom may not read.
FAREWELL_S = 2.0
FORCE_POLL_S = 0.05
ENGINE_JOIN_S = 5.0
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Door:
    """Where requests come in: a bound socket, what encrypts it, and the SIGHUPs so far."""

    sock: socket.socket
    tls: TlsContext | None
    hangups: Hangups


def run_server(
    llm: AsyncLLM,
    config: ServerConfig,
    door: Door,
    on_ready: Callable[[], None],
    traces: RequestTraces | None = None,
) -> bool:
    """Serves until a signal. Returns whether it ended in good order: False after a second signal.

    on_ready: called once connections are accepted. traces: closed after an orderly end.
    """
    keys = KeyRing(config.api_keys, config.admin_api_key)
    traffic = Traffic()
    limits = ConnectionLimits(
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        write_timeout_s=config.write_timeout_s,
        max_connections=config.max_connections,
    )
    app = create_app(llm, config, keys, traffic, traces)
    server = _Server(
        uvicorn.Config(
            app,
            http=functools.partial(BoundedConnection, limits=limits, traffic=traffic),  # type: ignore[arg-type]
            ws="none",
            loop="uvloop" if sys.platform != "win32" else "asyncio",
            log_config=None,
            access_log=False,  # RequestIds writes one that names requests
            backlog=BACKLOG,
            server_header=False,
            timeout_graceful_shutdown=None,
            ssl_context_factory=None if door.tls is None else _factory(door.tls),
        ),
        llm,
        config.shutdown_timeout_s,
        _Reloading(config, keys, door),
        on_ready,
        app.state.batches,
    )
    server.run(sockets=[door.sock])
    if server.force_exit:
        llm.engine.kill(ENGINE_JOIN_S)
    elif traces is not None:
        traces.close()
    return not server.force_exit


def _factory(tls: TlsContext) -> Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext]:
    return lambda config, default: tls.context


class _Reloading:
    """What SIGHUP reads again: the keys, and the certificate. Of a file with an error nothing."""

    def __init__(self, config: ServerConfig, keys: KeyRing, door: Door) -> None:
        self._api_key_file = config.api_key_file
        self._keys = keys
        self._tls = door.tls
        self._hangups = door.hangups

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reads again at every SIGHUP from now on, and now where one came since the start."""
        if self._hangups.is_watching:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
            if self._hangups.has_come:
                self._reload()

    def _reload(self) -> None:
        if self._api_key_file is not None:
            try:
                keys = load_key_file(self._api_key_file)
            except ConfigError as error:
                logger.error("the API keys stay as they were: %s", error)
            else:
                self._keys.replace(keys)
                logger.info("read %d API keys from %s", len(keys), self._api_key_file)
        if self._tls is not None:
            try:
                self._tls.reload()
            except ConfigError as error:
                logger.error("the certificate stays as it was: %s", error)
            else:
                logger.info("read the certificate again")


class _Server(uvicorn.Server):
    """uvicorn, with signals of our own: its own would end the process by the signal instead of by exit code 0."""

    def __init__(
        self,
        uvicorn_config: uvicorn.Config,
        llm: AsyncLLM,
        shutdown_timeout_s: float,
        reloading: _Reloading,
        on_ready: Callable[[], None],
        batches: BatchService,
    ) -> None:
        super().__init__(uvicorn_config)
        self._llm = llm
        self._shutdown_timeout_s = shutdown_timeout_s
        self._reloading = reloading
        self._on_ready = on_ready
        self._batches = batches

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._reloading.begin(asyncio.get_running_loop())
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the door, then waits for the streams: as long as allowed for their ends, then for their aborts."""
        self._batches.stop_taking()
        closing = asyncio.create_task(self._end_streams())
        try:
            await super().shutdown(sockets=sockets)
        finally:
            closing.cancel()

    async def _end_streams(self) -> None:
        engine = self._llm.engine
        if engine.is_paused:
            logger.info("going on after a pause, so that requests can finish")
            engine.resume()
        if engine.num_open_requests:
            logger.info("finishing %d requests, for at most %g s", engine.num_open_requests, self._shutdown_timeout_s)
        if not await self._is_forced_within(self._shutdown_timeout_s):
            if engine.num_open_requests:
                logger.warning("time is up: aborting %d requests", engine.num_open_requests)
            engine.abort_all()
            await self._is_forced_within(FAREWELL_S)
        # Left are readers that do not read, or everybody after a second signal.
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _is_forced_within(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while not self.force_exit and loop.time() < end_s:
            await asyncio.sleep(FORCE_POLL_S)
        return self.force_exit

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
