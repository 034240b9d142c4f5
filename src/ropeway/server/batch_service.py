"""Files and batches behind the routes: the directory, its journal and the runner, for as long as a server has them.

Knows no HTTP. Where the directory cannot be had the rest of the server runs without; it is tried again now and then, as
when a server takes over from one that is still shutting down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ropeway.batch.directory import BatchDirectory
from ropeway.batch.journal import Journal
from ropeway.batch.journal_thread import JournalThread
from ropeway.batch.lines import LineLimits
from ropeway.batch.records import BatchRecord, LineAnswer
from ropeway.errors import BatchStoreError
from ropeway.llm import AsyncLLM
from ropeway.server.batch_answers import answer_line
from ropeway.server.batch_runner import BatchRunner, RunnerTerms
from ropeway.server.config import ServerConfig
from ropeway.server.tenants import Caller, KeyRing, KeyTerms

logger = logging.getLogger(__name__)

MAX_LINES = 50_000  # of one batch
BATCH_LIFETIME_S = 30 * 24 * 3600  # how long a batch is remembered
REOPEN_S = 2.0
SWEEP_S = 60.0
# Lines in flight, of the sequences that may run: a few wait, so that a place which becomes free is filled at once.
IN_FLIGHT_RATIO = 1.25


def max_in_flight(max_num_seqs: int) -> int:
    """Lines in flight that keep an engine busy."""
    return int(IN_FLIGHT_RATIO * max_num_seqs) + 1


@dataclass(frozen=True, slots=True)
class OpenStore:
    """What there is once the directory is open."""

    directory: BatchDirectory
    journal: JournalThread
    runner: BatchRunner


class BatchService:
    """Belongs to the event loop. clock: epoch seconds."""

    def __init__(
        self, llm: AsyncLLM, config: ServerConfig, keys: KeyRing, clock: Callable[[], float] = time.time
    ) -> None:
        self._llm = llm
        self._keys = keys
        self._path = config.batch_dir
        self._limits = LineLimits(MAX_LINES, config.max_body_bytes)
        self.clock = clock
        self._store: OpenStore | None = None
        self._opening = asyncio.Lock()
        self._next_try_s = 0.0
        self._failure = BatchStoreError("this server keeps no files and batches; start it with --batch-dir")
        self._housekeeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens the directory and goes on with what is there; only warns where it cannot."""
        if self._path is None:
            return
        try:
            await self.store()
        except BatchStoreError as error:
            logger.warning("/v1/files and /v1/batches are refused: %s", error)
        self._housekeeping = asyncio.create_task(self._keep_house())

    async def store(self) -> OpenStore:
        """What is open. Raises BatchStoreError, which says why nothing is."""
        if self._store is not None:
            return self._store
        async with self._opening:
            if self._store is None:
                if self._path is None or time.monotonic() < self._next_try_s:
                    raise self._failure
                try:
                    self._store = await self._open()
                except BatchStoreError as error:
                    self._failure, self._next_try_s = error, time.monotonic() + REOPEN_S
                    raise
        return self._store

    def stop_taking(self) -> None:
        """Takes no more lines."""
        if self._store is not None:
            self._store.runner.stop_taking()

    async def close(self) -> None:
        """Stops; lines in flight are pending again, and everything that was answered is on disk."""
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        if self._store is not None:
            store, self._store = self._store, None
            self._failure = BatchStoreError("the server is shutting down")
            self._path = None
            await store.runner.close()
            await asyncio.to_thread(store.journal.close)
            store.directory.close()

    async def _open(self) -> OpenStore:
        assert self._path is not None
        directory = BatchDirectory(self._path)
        journal = JournalThread(await asyncio.to_thread(_open_journal, directory))
        terms = RunnerTerms(
            max_in_flight=max_in_flight(self._llm.facts.max_num_seqs),
            models=self._llm.facts.served_model_names,
            limits=self._limits,
            clock=self.clock,
        )
        runner = BatchRunner(directory, journal, self._answer, terms)
        await runner.start()
        return OpenStore(directory, journal, runner)

    async def _answer(self, record: BatchRecord, data: bytes, seed: int) -> LineAnswer:
        tenant = record.tenant
        caller = Caller(KeyTerms(tenant=tenant, weight=self._keys.weight_of(tenant)) if tenant else None)
        return await answer_line(self._llm, data, seed, caller)

    async def _keep_house(self) -> None:
        """Forgets what has expired; opens what could not be opened."""
        while True:
            is_open = self._store is not None
            try:
                store = await self.store()
                if not is_open:
                    logger.info("/v1/files and /v1/batches are served from %s", self._path)
                await self._forget_expired(store)
            except (BatchStoreError, OSError) as error:
                logger.debug("files were not looked after: %s", error)
            await asyncio.sleep(SWEEP_S if self._store is not None else REOPEN_S)

    async def _forget_expired(self, store: OpenStore) -> None:
        now_s = int(self.clock())
        forgotten = await store.journal.run(lambda journal: journal.forget_expired(now_s, BATCH_LIFETIME_S))
        for file_id in forgotten:
            await asyncio.to_thread(store.directory.remove, file_id)


def _open_journal(directory: BatchDirectory) -> Journal:
    """The journal of a directory that is opened and locked for it, cleared of what was cut off in writing."""
    directory.open()
    try:
        journal = Journal(directory.journal_path)
        directory.remove_others(journal.file_ids())
    except BaseException:
        directory.close()
        raise
    return journal
