"""schemathesis against the OpenAPI document of a live server: no 5xx.

    make evidence-schemathesis [ARGS="--max-examples 300 --seed 1"]

A server of its own process serves a random two-layer model. Writes dated JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from harness.results import new_document, result_path, save
from support.schemathesis_run import FLAGS, run_schemathesis


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs schemathesis against a server.")
    parser.add_argument("--max-examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    options = {"seed": args.seed, "max_examples": args.max_examples, "flags": FLAGS}
    document: dict[str, Any] = new_document("schemathesis", options)
    run = run_schemathesis(args.max_examples, args.seed)
    print(run.printed[-4000:])
    document |= {
        "exit_code": run.exit_code,
        "num_cases": run.num_cases,
        "summary": run.printed.partition("SUMMARY")[2].splitlines()[1:],
        "num_failed_steps": run.num_failed_steps,
        "num_tracebacks": run.num_tracebacks,
    }
    path = result_path(document)
    save(path, document)
    print(json.dumps(document["summary"], ensure_ascii=False), path)
    return 0 if run.is_good and run.num_cases else 1


if __name__ == "__main__":
    sys.exit(main())
