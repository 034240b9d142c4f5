"""The directory that holds a journal and its files, locked against a second server. Knows no batches.

    DIRECTORY/lock              held while somebody works here
    DIRECTORY/journal.sqlite    see `batch.journal`
    DIRECTORY/files/ID          contents; ID.part while they are written

A file counts once the journal names it; anything else under files/ was cut off in writing, and is removed at the next
start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from ropeway.errors import BatchStoreError


class BatchDirectory:
    """Open it with `open`, which locks it; `close` lets others in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: BinaryIO | None = None

    @property
    def journal_path(self) -> Path:
        return self.path / "journal.sqlite"

    def open(self) -> None:
        """Creates and locks the directory. Raises BatchStoreError where that cannot be, with the remedy."""
        try:
            (self.path / "files").mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (self.path / "lock").open("ab")
        except OSError as error:
            raise BatchStoreError(
                f"batches cannot be kept in {self.path}: {error.strerror}; give a place that can be written "
                "(--batch-dir)"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise BatchStoreError(
                f"another server, or another run, works in {self.path}; give this one a place of its own (--batch-dir)"
            ) from None
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def file_path(self, file_id: str) -> Path:
        """Where a file's content lies. file_id comes from the journal, never from a client."""
        return self.path / "files" / file_id

    def store(self, file_id: str, source: BinaryIO) -> int:
        """Writes a file from its beginning, on disk when this returns; its bytes. Raises OSError."""
        with NewFile(self.file_path(file_id)) as file:
            source.seek(0)
            shutil.copyfileobj(source, file.content, 1 << 20)
        return file.num_bytes

    def remove(self, file_id: str) -> None:
        self.file_path(file_id).unlink(missing_ok=True)

    def remove_others(self, file_ids: set[str]) -> None:
        """Removes whatever the journal does not name."""
        for path in (self.path / "files").iterdir():
            if path.name not in file_ids:
                path.unlink()


class NewFile:
    """A file that is there whole, on disk, once its `with` has ended well, and otherwise not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.part")
        self.num_bytes = 0

    def __enter__(self) -> NewFile:
        self.content = self._partial.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.content.flush()
                os.fsync(self.content.fileno())
                self.num_bytes = self.content.tell()
        finally:
            self.content.close()
            if kind is not None:
                self._partial.unlink(missing_ok=True)
        if kind is None:
            os.replace(self._partial, self._path)
            sync_directory(self._path.parent)


def sync_directory(path: Path) -> None:
    """Its entries are on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
