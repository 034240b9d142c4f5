"""Ropeway beside other engines on this machine: the same seeded requests, turn by turn, as pairs of runs.

    python benchmarks/peers.py                        every row, every peer of it
    python benchmarks/peers.py --dry-run              only the plan: who runs what, and about how long it takes
    python benchmarks/peers.py --rows c32 --peers llama-q4_0
    python benchmarks/peers.py --sweep                each peer's settings at c=32, to choose its best
    python benchmarks/peers.py --settings-from FILE   with the settings that were best in that sweep
    python benchmarks/peers.py --processor avx2       everyone as on a processor without AVX-512, AMX and VNNI

A round is one seed of one row: Ropeway and the row's peers, one after the other, in turning order; only one of them is
alive at a time, and each has two threads and no prefix cache. Ropeway's run of a round is paired with each peer's, and
what counts is the ratio within a pair: the table gives the median ratio, its range, and the target. Of rows whose
target is against the best peer, the peers that were behind it at the first seed sit out the other seeds. Every run goes
to benchmarks/results/ as it ends; --resume goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from harness.avx2_processor import avx2_environment
from harness.contestants import PEERS, Contestant, Measurement, Paddock, settings_of
from harness.environments import Environments
from harness.processes import ContestantError
from harness.results import ROOT, markdown_table, new_document, result_path, save
from harness.rows import METRICS, ROWS, Row, metric
from harness.schedule import Round, format_plan, planned_rounds, without_the_beaten
from harness.targets import doubtful_peers, format_comparison, pairs_of
from ropeway.catalog import DEFAULT_MODEL, resolve_model

SWEEP_REQUESTS = 96


def rows_of(args: argparse.Namespace) -> list[Row]:
    rows = [ROWS[name] for name in args.rows]
    if args.num_requests is not None:
        rows = [replace(row, num_requests=args.num_requests) for row in rows]
    return rows


def measure(contestant: Contestant, row: Row, seed: int) -> dict[str, Any]:
    """One run as it goes into the results, with a line of what came out."""
    start = time.monotonic()
    measurement: Measurement = contestant.measure(row, seed)
    summary = measurement.summary
    figures = {name: metric(summary, name) for name in METRICS}
    shown = "  ".join(f"{METRICS[name][0]} {value:,.1f}" for name, value in figures.items() if value is not None)
    print(
        f"  {row.name:>8} seed {seed}  {contestant.name:<14} {shown}  others' CPU {measurement.disturbed_share:.0%}"
        f"  ({time.monotonic() - start:.0f} s)",
        flush=True,
    )
    return {"figures": figures, "disturbed_share": measurement.disturbed_share, "summary": summary.to_dict()}


def run_rounds(args: argparse.Namespace, paddock: Paddock) -> int:
    document, path = _document(args)
    runs: list[dict[str, Any]] = document["runs"]
    rounds = planned_rounds(rows_of(args), args.peers, args.seeds)
    first_seed = args.seeds[0]
    num_failures = 0
    for number, planned in enumerate(rounds, 1):
        (each,) = (
            without_the_beaten([planned], _first_rates(runs, first_seed)) if planned.seed != first_seed else [planned]
        )
        done = {run["contestant"] for run in runs if (run["row"], run["seed"]) == (each.row.name, each.seed)}
        waiting = [name for name in each.order if name not in done]
        if not waiting:
            continue
        print(f"round {number} of {len(rounds)}: {each.row.name}, seed {each.seed}: {', '.join(waiting)}", flush=True)
        for name in waiting:
            num_failures += not _add_run(document, path, paddock, args, each, name)
    print(f"\n{format_comparison(runs)}")
    for sentence in doubtful_peers(runs):
        print(f"doubtful: {sentence}", file=sys.stderr)
    if args.markdown is not None:
        args.markdown.write_text(f"{format_comparison(runs)}\n")
    print(f"\nall runs and pairs: {path}")
    return 1 if num_failures else 0


def _add_run(
    document: dict[str, Any], path: Path, paddock: Paddock, args: argparse.Namespace, each: Round, name: str
) -> bool:
    """Measures one contestant of a round and stores it; whether that worked."""
    setting = args.settings.get(name)
    try:
        run = measure(paddock.contestant(name, each.row.model, setting), each.row, each.seed)
    except ContestantError as error:
        print(f"  not measured: {error}", file=sys.stderr, flush=True)
        return False
    document["runs"].append(
        {
            "row": each.row.name,
            "seed": each.seed,
            "contestant": name,
            "setting": setting or (settings_of(name)[0] if name in PEERS else args.ropeway_options),
            "num_requests": each.row.num_requests,
            "order": list(each.order),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **run,
        }
    )
    save(path, document | {"pairs": pairs_of(document["runs"])})
    return True


def _first_rates(runs: list[dict[str, Any]], first_seed: int) -> dict[tuple[str, str], float]:
    """(row, peer) -> output tokens/s at the first seed, of those measured."""
    return {
        (run["row"], run["contestant"]): run["figures"]["output_tokens_per_s"]
        for run in runs
        if run["seed"] == first_seed and run["contestant"] != "ropeway"
    }


def _document(args: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    if args.resume is not None:
        document: dict[str, Any] = orjson.loads(args.resume.read_bytes())
        return document, args.resume
    document = new_document(
        "peers",
        {
            "seeds": args.seeds,
            "num_requests": args.num_requests,
            "settings": args.settings,
            "ropeway_options": args.ropeway_options,
            "processor": args.processor,
        },
    )
    return document | {"runs": []}, result_path(document)


def best_settings(path: Path) -> dict[str, str]:
    """peer -> the setting with the most output tokens/s in a sweep's result file."""
    rates: dict[str, dict[str, float]] = {}
    for run in orjson.loads(path.read_bytes())["runs"]:
        if "figures" in run:
            rates.setdefault(run["peer"], {})[run["setting"]] = run["figures"]["output_tokens_per_s"]
    return {peer: max(settings, key=lambda name: settings[name]) for peer, settings in rates.items()}


def run_sweep(args: argparse.Namespace, paddock: Paddock) -> int:
    """Every setting of every chosen peer at c=32, fewer requests: enough to choose by, not to claim with."""
    row = replace(ROWS["c32"], num_requests=args.num_requests or SWEEP_REQUESTS)
    options = {"num_requests": row.num_requests, "seed": args.seeds[0], "processor": args.processor}
    document = new_document("peers-sweep", options) | {"runs": []}
    path = result_path(document)
    lines = []
    for peer in args.peers or row.peers:
        for setting in settings_of(peer):
            print(f"{peer}, {setting}", flush=True)
            try:
                run = measure(paddock.contestant(peer, row.model, setting), row, args.seeds[0])
            except ContestantError as error:
                run = {"error": str(error)}
                print(f"  not measured: {error}", file=sys.stderr, flush=True)
            document["runs"].append({"peer": peer, "setting": setting, **run})
            save(path, document)
            figures = run.get("figures", {})
            lines.append([peer, setting, *(f"{figures[name]:,.1f}" if figures.get(name) else "–" for name in METRICS)])
    print(f"\n{markdown_table(('peer', 'setting', *(label for label, _ in METRICS.values())), lines)}\n\n{path}")
    print(f"best: {best_settings(path)}")
    return 0


def _setting(text: str) -> tuple[str, str]:
    peer, _, setting = text.partition("=")
    if peer not in PEERS or setting not in settings_of(peer):
        known = ", ".join(settings_of(peer)) if peer in PEERS else ", ".join(PEERS)
        raise argparse.ArgumentTypeError(f"{text!r}: expected PEER=SETTING; known: {known}")
    return peer, setting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="rows to run, in order")
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="only these, where a row has them")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="one pair each, at least three to claim"
    )
    parser.add_argument(
        "--num-requests", type=int, help="requests per run, for a quick look; a claim needs the default"
    )
    parser.add_argument(
        "--settings", nargs="+", type=_setting, default=[], metavar="PEER=SETTING", help="other settings"
    )
    parser.add_argument(
        "--settings-from", type=Path, metavar="FILE", help="the best setting of each peer in this sweep's result file"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and do nothing")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here too")
    parser.add_argument("--sweep", action="store_true", help="try each peer's settings at c=32 instead")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with the runs missing from this result file")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the Q4_1 file that Ropeway serves: a name or a path")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".cache" / "peers", help="where peers are installed"
    )
    parser.add_argument(
        "--processor",
        choices=("own", "avx2"),
        default="own",
        help="what every program is shown of this machine's: all of it, or no vectors wider than AVX2's and no VNNI",
    )
    parser.add_argument("--ropeway-options", default="", help="further flags of `ropeway serve`, as one string")
    args = parser.parse_args()
    args.settings = (best_settings(args.settings_from) if args.settings_from else {}) | dict(args.settings)
    if not args.sweep:
        print(format_plan(planned_rounds(rows_of(args), args.peers, args.seeds)), flush=True)
    if args.dry_run:
        return 0
    args.environments.mkdir(parents=True, exist_ok=True)
    if args.processor == "avx2":
        os.environ |= avx2_environment(args.environments)  # of what is started, not of this process
    environments = Environments(args.environments.resolve())
    paddock = Paddock(environments, resolve_model(args.model), args.environments, args.ropeway_options.split())
    return run_sweep(args, paddock) if args.sweep else run_rounds(args, paddock)


if __name__ == "__main__":
    sys.exit(main())
