"""What the native module does where threads and memory are not to be had: it says so, and goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.random_gguf import RandomModel, write_random_gguf

PREAMBLE = """
import resource, sys
import numpy as np
from ropeway import _native
from ropeway.backends.batch import BlockTables, ForwardBatch
from ropeway.backends.native import NativeBackend
from ropeway.errors import ConfigError
from ropeway.model.loading import load_model

def bound(more_bytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, resource.RLIM_INFINITY))

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def batch(num_tokens, num_out=1):
    ids = np.arange(num_tokens, dtype=np.int32) % 40
    table = BlockTables(np.arange(-(-num_tokens // 16), dtype=np.int32), np.zeros(1, np.int64))
    return ForwardBatch(ids, np.arange(num_tokens, dtype=np.int32), np.array([0, num_tokens], np.int32),
                        np.array([num_tokens], np.int32), (table,),
                        np.arange(num_tokens - num_out, num_tokens, dtype=np.int32))

model = load_model(sys.argv[1])
backend = NativeBackend(model.program, model.tensors, num_kv_blocks=64, num_threads=1)
"""


def run(script: str, model: Path) -> None:
    command = [sys.executable, "-c", PREAMBLE + script, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_gguf(tmp_path_factory.mktemp("scarce") / "model.gguf", RandomModel())


def test_threads_that_cannot_be_started_are_an_error(model: Path) -> None:
    run(
        """
bound(512 << 20)  # some sixty stacks
try:
    NativeBackend(model.program, model.tensors, num_kv_blocks=4, num_threads=4096)
except ConfigError as error:
    assert "4096 threads cannot be started here" in str(error), error
else:
    raise AssertionError("they were started")
assert NativeBackend(model.program, model.tensors, num_kv_blocks=4, num_threads=2).forward(batch(3)).shape[0] == 1
""",
        model,
    )


def test_a_pass_goes_on_after_one_that_found_no_memory(model: Path) -> None:
    run(
        """
expected = backend.forward(batch(3)).copy()
bound(-(16 << 20))  # less than what the rows of a longer pass take, also when those of before are given back
try:
    backend.forward(batch(200))
except MemoryError:
    pass
else:
    raise AssertionError("there was memory")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for num_tokens in (3, 200, 3):
    logits = backend.forward(batch(num_tokens)).copy()
assert np.array_equal(logits, expected)
""",
        model,
    )


def test_logits_of_a_whole_prompt_are_given_back(tmp_path: Path) -> None:
    wide = write_random_gguf(tmp_path / "wide.gguf", RandomModel(vocab_size=1 << 17))
    run(
        """
backend.forward(batch(2))
before = resident()
backend.forward(batch(400, num_out=400))
assert resident() - before > 150 << 20, (before, resident())
backend.forward(batch(2))
assert resident() - before < 50 << 20, (before, resident())
""",
        wide,
    )
