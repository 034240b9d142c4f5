"""A program under `--processor avx2` sees AVX2 and nothing wider; whatever else it does is as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.avx2_processor import ProcessorError, avx2_environment
from ropeway import _native

HIDDEN = "avx512"
SHOW = "from ropeway import _native; print(*_native.supported_isas())"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if "cpuid_fault" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("cpuid does not fault on this machine")
    return os.environ | avx2_environment(tmp_path_factory.mktemp("processor"))


def under(environment: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_wider_vectors_are_hidden_and_nothing_else(environment: dict[str, str]) -> None:
    done = under(environment, SHOW)
    assert done.stdout.split() == [isa for isa in _native.supported_isas() if isa != HIDDEN]


def test_threads_and_programs_that_it_starts_see_the_same(environment: dict[str, str]) -> None:
    code = f"""
import subprocess, sys, threading
run = lambda: print(subprocess.run([sys.executable, "-c", {SHOW!r}], capture_output=True, text=True).stdout)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    done = under(environment, code)
    assert done.stdout.split() and HIDDEN not in done.stdout.split()


def test_a_crash_is_still_a_crash(environment: dict[str, str]) -> None:
    done = under(environment, "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)")
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(("status", "remedy"), [(97, "another machine"), (1, "status 1")])
def test_a_machine_that_cannot_is_refused(tmp_path: Path, status: int, remedy: str) -> None:
    with pytest.raises(ProcessorError, match=remedy):
        avx2_environment(tmp_path, lambda command, **options: subprocess.CompletedProcess(command, status))
