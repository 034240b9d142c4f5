"""A hundred thousand fuzzed bodies to every POST endpoint: whatever is sent, no 5xx, and nothing is left behind.

    make evidence-fuzz [ARGS="--num-cases 100000 --seed 0 --resume FILE"]

82 of 100 bodies are valid ones with one field changed, the rest have several changed, wrong bytes, or are any JSON.
They go to the application of a random two-layer model in this process, 48 at a time, in legs of 1000. After each leg
every request must have ended, every block be free, no step have failed, and nothing be logged as an error. A case is
made from (seed, number) alone: `--case N` sends one again and shows its answer. Prints a line per leg; writes dated
JSON, leg by leg.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.results import markdown_table, open_document, save
from ropeway.server.config import ServerConfig
from support.asgi_client import running_app
from support.fuzz_run import Verdict, run_cases
from support.fuzzing import fuzz_case
from support.random_gguf import RandomModel, write_random_gguf

LEG_CASES = 1000
ENGINE: dict[str, object] = {"num_kv_blocks": 512, "max_num_seqs": 64, "num_threads": 1, "served_model_name": "tiny"}
LEAST_ONE_FIELD_SHARE, LEAST_SUCCESS_SHARE = 0.8, 0.2


def leg_record(leg: int, verdicts: Sequence[Verdict], seconds: float) -> dict[str, Any]:
    """What one leg adds to the results."""
    answers: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        answers.setdefault(verdict.case.path, Counter())[f"{verdict.status} {verdict.code}"] += 1
    problems = [
        {
            "case": verdict.case.number,
            "path": verdict.case.path,
            "body": verdict.case.body[:2000].decode(errors="replace"),
            "status": verdict.status,
            "problem": verdict.problem,
        }
        for verdict in verdicts
        if verdict.problem is not None
    ]
    return {
        "leg": leg,
        "seconds": round(seconds, 1),
        "most_resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "kinds": Counter(verdict.case.kind for verdict in verdicts),
        "answers": {path: dict(counts) for path, counts in sorted(answers.items())},
        "problems": problems,
    }


def summary(legs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The table of all legs: status and error code, by endpoint; and whether the targets are met."""
    kinds: Counter[str] = Counter()
    table: dict[str, Counter[str]] = {}
    for leg in legs:
        kinds.update(leg["kinds"])
        for path, counts in leg["answers"].items():
            for answer, count in counts.items():
                table.setdefault(answer, Counter())[path] += count
    total = kinds.total()
    by_status: Counter[str] = Counter()
    for answer, counts in table.items():
        by_status[answer[:1] + "xx"] += counts.total()
    return {
        "num_cases": total,
        "one_field_share": round(kinds["one field"] / total, 4),
        "success_share": round(by_status["2xx"] / total, 4),
        "num_5xx": by_status["5xx"],
        "num_problems": sum(len(leg["problems"]) for leg in legs),
        "kinds": dict(kinds),
        "statuses": dict(sorted(by_status.items())),
        "table": {answer: dict(sorted(counts.items())) for answer, counts in sorted(table.items())},
    }


def shown(found: dict[str, Any]) -> str:
    """The table of status and code by endpoint, as markdown."""
    paths = sorted({path for counts in found["table"].values() for path in counts})
    rows = [
        [answer, str(sum(counts.values())), *(str(counts.get(path, 0)) for path in paths)]
        for answer, counts in found["table"].items()
    ]
    return markdown_table(["answer", "all", *paths], rows)


async def run(args: argparse.Namespace, model: Path) -> bool:
    """Runs what is missing of the legs; whether the targets are met."""
    options = {"seed": args.seed, "num_cases": args.num_cases, "engine": ENGINE}
    document, path = open_document(args.resume, "fuzz-server", options, "legs")
    seed, num_cases = document["options"]["seed"], document["options"]["num_cases"]
    async with running_app(model, ServerConfig(batch_dir=model.parent / "batches"), **ENGINE) as client:
        for leg in range(len(document["legs"]), -(-num_cases // LEG_CASES)):
            start_s, first = time.monotonic(), leg * LEG_CASES
            numbers = range(first, min(first + LEG_CASES, num_cases))
            verdicts = await run_cases(client, [fuzz_case(seed, number) for number in numbers])
            record = leg_record(leg, verdicts, time.monotonic() - start_s)
            document["legs"].append(record)
            document |= summary(document["legs"])
            save(path, document)
            print(
                f"{document['num_cases']} of {num_cases}: {document['statuses']}, {record['seconds']} s, "
                f"{record['most_resident_mib']} MiB, {document['num_problems']} problems",
                flush=True,
            )
            for problem in record["problems"]:
                print(f"  {problem}", flush=True)
    print(shown(document))
    print(path)
    return (
        document["num_problems"] == 0
        and document["num_5xx"] == 0
        and document["one_field_share"] >= LEAST_ONE_FIELD_SHARE
        and document["success_share"] >= LEAST_SUCCESS_SHARE
    )


async def run_one(seed: int, number: int, model: Path) -> None:
    """Sends one case again and shows what it is and what comes back."""
    case = fuzz_case(seed, number)
    print(case.path, case.kind, case.body)
    async with running_app(model, ServerConfig(batch_dir=model.parent / "batches"), **ENGINE) as client:
        print(await client.post(case.path, case.body, case.content_type))


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes the server's endpoints.")
    parser.add_argument("--num-cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a result file to go on with")
    parser.add_argument("--case", type=int, help="send only this one, and show its answer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_gguf(Path(folder) / "tiny.gguf", RandomModel(context_length=1024))
        if args.case is not None:
            asyncio.run(run_one(args.seed, args.case, model))
            return 0
        return 0 if asyncio.run(run(args, model)) else 1


if __name__ == "__main__":
    sys.exit(main())
