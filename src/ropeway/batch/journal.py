"""The journal of files and batches: SQLite, every commit on disk before anybody is told. Knows no threads and no HTTP.

What is in the journal has happened, and nothing else has: a line is pending until its answer is here, and the key of
`answers` lets each line have one. One connection, one thread; `transaction` groups what is to be committed together.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path

import orjson

from ropeway.batch.lines import LineFault, LineSpec
from ropeway.batch.records import OPEN_STATUSES, BatchRecord, BatchStatus, FileRecord, LineAnswer, Page, PendingLine
from ropeway.errors import BatchStoreError

SCHEMA_VERSION = 1
SEED_BITS = 63  # SQLite's integers are signed

_FILE_COLUMNS = [field.name for field in fields(FileRecord)]
_BATCH_COLUMNS = [field.name for field in fields(BatchRecord)]
_NUMBER_COLUMNS = {
    field.name for kind in (FileRecord, BatchRecord) for field in fields(kind) if "int" in str(field.type)
}


def _columns(names: Sequence[str]) -> str:
    return ", ".join(f"{name} {'INTEGER' if name in _NUMBER_COLUMNS else 'TEXT'}" for name in names)


_SCHEMA = f"""
CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, {_columns(_FILE_COLUMNS)}, UNIQUE (file_id));
CREATE TABLE batches (number INTEGER PRIMARY KEY AUTOINCREMENT,
    {_columns([name for name in _BATCH_COLUMNS if name != "number"])}, UNIQUE (batch_id));
CREATE INDEX open_batches ON batches (status);
CREATE TABLE lines (batch INTEGER, number INTEGER, custom_id TEXT, start INTEGER, num_bytes INTEGER, seed INTEGER,
    PRIMARY KEY (batch, number)) WITHOUT ROWID;
CREATE TABLE answers (batch INTEGER, number INTEGER, status_code INTEGER, request_id TEXT, body BLOB,
    UNIQUE (batch, number));
PRAGMA user_version = {SCHEMA_VERSION};
"""


class Journal:
    """Everything that is remembered of files and batches. Methods that change something want to be in a transaction."""

    def __init__(self, path: Path) -> None:
        """Opens or creates it. Raises BatchStoreError where it cannot be used."""
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.row_factory = sqlite3.Row
            self._set_up(path)
        except sqlite3.Error as error:
            raise BatchStoreError(f"the journal {path} cannot be used: {error}") from error

    def _set_up(self, path: Path) -> None:
        run = self._connection.execute
        run("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect in a file that is still empty
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        version = run("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        elif version != SCHEMA_VERSION:
            raise BatchStoreError(
                f"the journal {path} is of version {version}, and this release reads {SCHEMA_VERSION}: give another "
                "directory, or the release that wrote it"
            )

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is done inside is on disk once it has ended, all of it or nothing."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have ended it already
                self._connection.execute("ROLLBACK")
            raise

    # -- files ---------------------------------------------------------------------------------------------------------

    def add_file(self, record: FileRecord) -> None:
        self._insert("files", asdict(record))

    def file(self, file_id: str) -> FileRecord | None:
        row = self._connection.execute("SELECT * FROM files WHERE file_id = ?", (file_id,)).fetchone()
        return None if row is None else _file(row)

    def files(self, tenant: str | None, purpose: str | None, page: Page) -> list[FileRecord]:
        """Those of a tenant, or of all; by creation. An `after` that is not theirs gives nothing."""
        wanted = {"tenant": tenant, "purpose": purpose}
        return [_file(row) for row in self._page("files", "file_id", wanted, page)]

    def delete_file(self, file_id: str) -> None:
        self._connection.execute("DELETE FROM files WHERE file_id = ?", (file_id,))

    def num_stored(self) -> tuple[int, int]:
        """(number, bytes) of all files."""
        row = self._connection.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM files").fetchone()
        return int(row[0]), int(row[1])

    def readers_of(self, file_id: str) -> list[str]:
        """The ids of the open batches that read a file."""
        rows = self._connection.execute(
            f"SELECT batch_id FROM batches WHERE input_file_id = ? AND status IN {OPEN_STATUSES}", (file_id,)
        )
        return [row["batch_id"] for row in rows]

    def forget_expired(self, now_s: int, batch_lifetime_s: int) -> list[str]:
        """Forgets what has expired: files that no open batch reads, and batches that ended long ago. The ids of the
        files.
        """
        rows = self._connection.execute(
            "DELETE FROM files WHERE expires_s <= ? AND NOT EXISTS (SELECT 1 FROM batches WHERE "
            f"input_file_id = files.file_id AND status IN {OPEN_STATUSES}) RETURNING file_id",
            (now_s,),
        ).fetchall()
        self._connection.execute(
            f"DELETE FROM batches WHERE created_s <= ? AND status NOT IN {OPEN_STATUSES}",
            (now_s - batch_lifetime_s,),
        )
        return [row["file_id"] for row in rows]

    def file_ids(self) -> set[str]:
        return {row["file_id"] for row in self._connection.execute("SELECT file_id FROM files")}

    # -- batches -------------------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> BatchRecord:
        """The same, with its number."""
        values = asdict(record)
        del values["number"]
        self._insert("batches", values)
        return self._sure(record.batch_id)

    def batch(self, batch_id: str) -> BatchRecord | None:
        row = self._connection.execute("SELECT * FROM batches WHERE batch_id = ?", (batch_id,)).fetchone()
        return None if row is None else _batch(row)

    def batches(self, tenant: str | None, page: Page) -> list[BatchRecord]:
        """Those of a tenant, or of all; by creation. An `after` that is not theirs gives nothing."""
        return [_batch(row) for row in self._page("batches", "batch_id", {"tenant": tenant}, page)]

    def open_batches(self, tenant: str | None = None) -> list[BatchRecord]:
        """Those that have not ended, oldest first."""
        rows = self._connection.execute(
            f"SELECT * FROM batches WHERE status IN {OPEN_STATUSES} AND coalesce(tenant = ?, 1) ORDER BY number",
            (tenant,),
        )
        return [_batch(row) for row in rows]

    def set_status(
        self, batch_id: str, status: BatchStatus, now_s: int, *, only_from: BatchStatus | None = None
    ) -> BatchRecord:
        """The batch as it is then. only_from: it stays as it is where its status is another."""
        self._connection.execute(
            f"UPDATE batches SET status = ?, {status}_s = ? WHERE batch_id = ? AND status = coalesce(?, status)",
            (status, now_s, batch_id, only_from),
        )
        return self._sure(batch_id)

    def fail(self, batch_id: str, faults: Sequence[LineFault], now_s: int) -> BatchRecord:
        """Its input is wrong: nothing of it runs."""
        written = orjson.dumps([asdict(fault) for fault in faults]).decode()
        self._connection.execute("UPDATE batches SET faults = ? WHERE batch_id = ?", (written, batch_id))
        return self.set_status(batch_id, "failed", now_s)

    def begin(self, batch_id: str, specs: Sequence[LineSpec], now_s: int) -> BatchRecord:
        """Its input is right: the lines are pending from now on, each with a seed of its own. One that is cancelling
        goes on to do so.
        """
        number = self._sure(batch_id).number
        self._connection.executemany(
            "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?)",
            (
                (number, spec.number, spec.custom_id, spec.start, spec.num_bytes, secrets.randbits(SEED_BITS))
                for spec in specs
            ),
        )
        self._connection.execute("UPDATE batches SET num_lines = ? WHERE number = ?", (len(specs), number))
        return self.set_status(batch_id, "in_progress", now_s, only_from="validating")

    def pending_lines(self, batch: int, after: int, limit: int) -> list[PendingLine]:
        """The next lines of a batch, by its number, that have no answer."""
        rows = self._connection.execute(
            "SELECT number, custom_id, start, num_bytes, seed FROM lines WHERE batch = ? AND number > ? AND NOT EXISTS "
            "(SELECT 1 FROM answers WHERE answers.batch = lines.batch AND answers.number = lines.number) "
            "ORDER BY number LIMIT ?",
            (batch, after, limit),
        )
        return [PendingLine(*row) for row in rows]

    def put_answer(self, batch: int, number: int, answer: LineAnswer) -> None:
        """A line is answered. The first answer stays."""
        cursor = self._connection.execute(
            "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, ?)",
            (batch, number, answer.status_code, answer.request_id, answer.body),
        )
        if cursor.rowcount:
            counter = "num_completed" if answer.is_success else "num_failed"
            self._connection.execute(
                f"UPDATE batches SET {counter} = {counter} + 1, num_prompt_tokens = num_prompt_tokens + ?, "
                "num_cached_tokens = num_cached_tokens + ?, num_output_tokens = num_output_tokens + ? WHERE number = ?",
                (answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_output_tokens, batch),
            )

    def results(self, batch: int) -> Iterator[tuple[int, str, LineAnswer | None]]:
        """(number, custom_id, answer) of every line, in order; None where it has none."""
        rows = self._connection.execute(
            "SELECT lines.number, custom_id, status_code, request_id, body FROM lines LEFT JOIN answers "
            "ON answers.batch = lines.batch AND answers.number = lines.number WHERE lines.batch = ? "
            "ORDER BY lines.number",
            (batch,),
        )
        for number, custom_id, status_code, request_id, body in rows:
            answer = None
            if status_code is not None:
                answer = LineAnswer(status_code=status_code, request_id=request_id, body=body)
            yield number, custom_id, answer

    def end(self, batch_id: str, status: BatchStatus, files: Sequence[FileRecord | None], now_s: int) -> BatchRecord:
        """A batch has ended with an output file and an error file, where it has them; its lines are in there."""
        for record in files:
            if record is not None:
                self.add_file(record)
        output_id, error_id = (None if record is None else record.file_id for record in files)
        number = self._sure(batch_id).number
        self._connection.execute("DELETE FROM lines WHERE batch = ?", (number,))
        self._connection.execute("DELETE FROM answers WHERE batch = ?", (number,))
        self._connection.execute(
            "UPDATE batches SET output_file_id = ?, error_file_id = ? WHERE number = ?", (output_id, error_id, number)
        )
        return self.set_status(batch_id, status, now_s)

    def give_back_space(self) -> None:
        """The room of deleted rows, to the file system; outside transactions."""
        self._connection.execute("PRAGMA incremental_vacuum").fetchall()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _sure(self, batch_id: str) -> BatchRecord:
        record = self.batch(batch_id)
        assert record is not None, f"no batch {batch_id}"
        return record

    def _insert(self, table: str, values: dict[str, object]) -> None:
        names = ", ".join(values)
        places = ", ".join(f":{name}" for name in values)
        self._connection.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", values)

    def _page(self, table: str, key: str, wanted: dict[str, str | None], page: Page) -> list[sqlite3.Row]:
        clauses = [f"coalesce({name} = :{name}, 1)" for name in wanted]
        values: dict[str, object] = {**wanted, "limit": page.limit}
        if page.after is not None:
            sign = ">" if page.is_ascending else "<"
            among = " AND ".join(clauses)
            clauses.append(f"number {sign} (SELECT number FROM {table} WHERE {key} = :after AND {among})")
            values["after"] = page.after
        order = "ASC" if page.is_ascending else "DESC"
        sql = f"SELECT * FROM {table} WHERE {' AND '.join(clauses)} ORDER BY number {order} LIMIT :limit"
        return self._connection.execute(sql, values).fetchall()


def _file(row: sqlite3.Row) -> FileRecord:
    return FileRecord(**{name: row[name] for name in _FILE_COLUMNS})


def _batch(row: sqlite3.Row) -> BatchRecord:
    return BatchRecord(**{name: row[name] for name in _BATCH_COLUMNS})
