"""schemathesis against the OpenAPI document of a live server: no 5xx.

    make evidence-schemathesis [ARGS="--max-examples 300 --seed 1"]

A server of its own process serves a random two-layer model, and `schemathesis run` sends what the document allows and
what it forbids to every operation but /pause, whose answer would stop the rest. Writes dated JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.results import ROOT, new_document, result_path, save
from support.random_gguf import RandomModel, write_random_gguf
from support.running_server import RunningServer

FLAGS = ("--num-kv-blocks", "512", "--max-num-seqs", "32", "--num-threads", "1", "--served-model-name", "tiny")


def run_schemathesis(program: Path, url: str, max_examples: int, seed: int) -> tuple[int, str]:
    """Its exit code and what it printed."""
    command = [
        program, "run", f"{url}/openapi.json", "--checks", "not_a_server_error", "--max-examples", str(max_examples),
        "--seed", str(seed), "--phases", "examples,coverage,fuzzing", "--exclude-path", "/pause", "--request-timeout",
        "60", "--no-color",
    ]  # fmt: skip
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    print(ran.stdout[-4000:], ran.stderr[-2000:])
    return ran.returncode, ran.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs schemathesis against a server.")
    parser.add_argument("--max-examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "schemathesis" / "bin" / "schemathesis")
    args = parser.parse_args()
    options = {"seed": args.seed, "max_examples": args.max_examples, "flags": FLAGS}
    document: dict[str, Any] = new_document("schemathesis", options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_random_gguf(folder / "tiny.gguf", RandomModel())
        with RunningServer(model, *FLAGS, "--batch-dir", str(folder / "batches")) as server:
            code, printed = run_schemathesis(args.program, server.url, args.max_examples, args.seed)
            num_failed_steps, log = server.metric("engine_failed_steps_total"), server.log()
    (num_cases,) = re.findall(r"(\d+) generated", printed)
    document |= {
        "exit_code": code,
        "num_cases": int(num_cases),
        "summary": printed[printed.index("SUMMARY") :].splitlines()[1:],
        "num_failed_steps": num_failed_steps,
        "num_tracebacks": log.count("Traceback"),
    }
    path = result_path(document)
    save(path, document)
    print(json.dumps(document["summary"], ensure_ascii=False), path)
    return 0 if code == 0 and num_failed_steps == 0 and document["num_tracebacks"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
