"""What every test may ask for: the default model's file. Sets the environment that tests run in."""

from __future__ import annotations

import os
from pathlib import Path

# Before numpy is imported: its matrix library spins in every thread it has, and beside other work on a small machine
# that made a forward pass of the reference backend 8 times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from tests.support.random_gguf import RandomModel, write_random_gguf

import ropeway.core.scheduler
from ropeway._core_digest import DIGEST_FILE, digest_of_core
from ropeway._written_core import is_interpreted
from ropeway.catalog import resolve_model

if not is_interpreted():
    compiled_from = Path(ropeway.core.scheduler.__file__).with_name(DIGEST_FILE)
    if not compiled_from.exists() or compiled_from.read_text() != digest_of_core():
        pytest.exit("ropeway.core was changed since it was built: `make setup`, or ROPEWAY_INTERPRET_CORE=1", 2)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file, fetched where it is not cached; ROPEWAY_MODEL_FILE names another, for development."""
    return resolve_model(os.environ.get("ROPEWAY_MODEL_FILE", "smollm2"))


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two small layers with a byte-level tokenizer, 320 tokens and a context of 512."""
    return write_random_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", RandomModel())
