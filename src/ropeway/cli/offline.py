"""A file of requests answered in this process: the runner and the journal of batches, without a server.

OUTPUT.journal beside the output holds what is answered so far, and which question it answers. OUTPUT is there once
every line is answered, in the order of the input, each answer as in the output file of a batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from ropeway.batch.directory import BatchDirectory
from ropeway.batch.journal import Journal
from ropeway.batch.journal_thread import JournalThread
from ropeway.batch.lines import LineLimits, read_lines
from ropeway.batch.records import BatchRecord, FileRecord, LineAnswer, Page
from ropeway.errors import ConfigError

T = TypeVar("T")

LIMITS = LineLimits(num_lines=10_000_000, line_bytes=256 << 20)
FOREVER_S = 10**10


@dataclass(frozen=True, slots=True)
class OfflineBatch:
    """One run: input is the lines of a batch; model and options say what answers them."""

    output: Path
    input: bytes
    model: str
    options: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Of the question: one output never holds answers to two."""
        return hashlib.sha256(orjson.dumps(self.model) + b"\n" + self.input).hexdigest()


@dataclass(frozen=True, slots=True)
class Progress:
    """Lines answered, of which some with an error, of all."""

    num_lines: int
    num_answered: int
    num_refused: int


class OfflineRun:
    """The journal of a run, open and locked inside `with`.

    Raises ConfigError where the output holds something else, BatchStoreError where it cannot be written.
    """

    def __init__(self, batch: OfflineBatch) -> None:
        self._batch = batch
        self._directory = BatchDirectory(batch.output.with_name(f"{batch.output.name}.journal"))

    def __enter__(self) -> OfflineRun:
        output = self._batch.output
        if output.exists() and (not output.is_file() or not self._directory.journal_path.exists()):
            raise ConfigError(f"{output} exists and is not of an earlier run; give another --output")
        self._directory.open()
        try:
            self._thread = JournalThread(Journal(self._directory.journal_path))
        except BaseException:
            self._directory.close()
            raise
        try:
            self._record = self._begun()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.close()
        self._directory.close()

    @property
    def progress(self) -> Progress:
        record = self._record
        return Progress(record.num_lines, record.num_completed + record.num_failed, record.num_failed)

    def answer(self, on_answered: Callable[[LineAnswer], None]) -> None:
        """Answers what is left, and writes the output. Raises BatchStoreError where the disk is full."""
        if self._record.is_open:
            asyncio.run(self._run(on_answered))
            self._record = self._submit(lambda journal: journal.batches(None, Page(limit=1)))[0]
        file_id, output = self._record.output_file_id, self._batch.output
        if file_id is not None and self._directory.file_path(file_id).exists():
            os.replace(self._directory.file_path(file_id), output)
        elif not output.exists():
            raise ConfigError(f"{output} was written and is gone; remove {self._directory.path} to start over")

    def _begun(self) -> BatchRecord:
        """The batch of this output, begun now or by an earlier run."""
        known = self._submit(lambda journal: journal.batches(None, Page(limit=1)))
        if known:
            if orjson.loads(known[0].metadata)["digest"] != self._batch.digest:
                raise ConfigError(
                    f"{self._batch.output} answers another question: the input, the model or the sampling flags have "
                    f"changed since; give another --output, or remove {self._directory.path} to start over"
                )
            return known[0]
        now_s, file_id = int(time.time()), f"file-{secrets.token_hex(16)}"
        num_bytes = self._directory.store(file_id, io.BytesIO(self._batch.input))
        specs, faults = read_lines(self._directory.file_path(file_id), None, LIMITS)
        if faults:
            self._directory.remove(file_id)
            raise ConfigError(f"the input is wrong: {faults[0].message}")
        file = FileRecord(
            file_id=file_id,
            tenant="",
            filename="input",
            purpose="batch",
            num_bytes=num_bytes,
            created_s=now_s,
            expires_s=now_s + FOREVER_S,
        )
        record = BatchRecord(
            batch_id=f"batch_{secrets.token_hex(16)}",
            tenant="",
            input_file_id=file_id,
            endpoint="",
            model=self._batch.model,
            metadata=orjson.dumps({"digest": self._batch.digest}).decode(),
            status="validating",
            created_s=now_s,
            expires_s=now_s + FOREVER_S,
            output_lifetime_s=FOREVER_S,
        )

        def begin(journal: Journal) -> BatchRecord:
            journal.add_file(file)
            journal.add_batch(record)
            return journal.begin(record.batch_id, specs, now_s)

        return self._submit(begin)

    async def _run(self, on_answered: Callable[[LineAnswer], None]) -> None:
        from ropeway.llm import AsyncLLM
        from ropeway.server.batch_answers import answer_line
        from ropeway.server.batch_runner import BatchRunner, RunnerTerms
        from ropeway.server.batch_service import max_in_flight
        from ropeway.server.tenants import Caller

        async with AsyncLLM(self._batch.model, **self._batch.options) as llm:
            anyone = Caller(None)
            terms = RunnerTerms(
                max_in_flight=max_in_flight(llm.facts.max_num_seqs),
                models=(self._batch.model,),
                limits=LIMITS,
                has_one_file=True,
            )

            async def answer(record: BatchRecord, data: bytes, seed: int) -> LineAnswer:
                return await answer_line(llm, data, seed, anyone)

            runner = BatchRunner(self._directory, self._thread, answer, terms, on_answered)
            await runner.start()
            try:
                await runner.wait_idle()
            finally:
                await runner.close()

    def _submit(self, operation: Callable[[Journal], T]) -> T:
        return self._thread.submit(operation).result()
