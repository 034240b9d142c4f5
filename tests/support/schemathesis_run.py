"""schemathesis against the OpenAPI document of a server that serves a random two-layer model."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support.random_gguf import RandomModel, write_random_gguf
from support.running_server import RunningServer

FLAGS = ("--num-kv-blocks", "512", "--max-num-seqs", "32", "--num-threads", "1", "--served-model-name", "tiny")


@dataclass(frozen=True)
class SchemathesisRun:
    """exit_code, printed: of schemathesis. num_failed_steps, num_tracebacks: of the server, in its metrics and log."""

    exit_code: int
    printed: str
    num_failed_steps: float
    num_tracebacks: int

    @property
    def num_cases(self) -> int:
        """Requests made; 0 where it did not come so far."""
        found = re.search(r"(\d+) generated", self.printed)
        return int(found[1]) if found else 0

    @property
    def is_good(self) -> bool:
        return self.exit_code == 0 and not self.num_failed_steps and not self.num_tracebacks


def run_schemathesis(max_examples: int, seed: int) -> SchemathesisRun:
    """What the document allows and what it forbids is sent to every operation but /pause, whose answer would stop the
    rest; at most so many random cases of each. A 5xx fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_random_gguf(folder / "tiny.gguf", RandomModel())
        with RunningServer(model, *FLAGS, "--batch-dir", str(folder / "batches")) as server:
            command = [
                str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json",
                "--checks", "not_a_server_error", "--max-examples", str(max_examples), "--seed", str(seed),
                "--phases", "examples,coverage,fuzzing", "--exclude-path", "/pause", "--request-timeout", "60",
                "--no-color",
            ]  # fmt: skip
            ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=3600)
            num_failed_steps, log = server.metric("engine_failed_steps_total"), server.log()
    return SchemathesisRun(ran.returncode, ran.stdout + ran.stderr, num_failed_steps, log.count("Traceback"))
