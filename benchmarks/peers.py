"""Ropeway beside other engines on this machine: the same seeded requests, turn by turn, as pairs of runs.

    python benchmarks/peers.py                        every row, every peer of it
    python benchmarks/peers.py --rows c32 --peers llama-q4_0
    python benchmarks/peers.py --sweep                each peer's settings at c=32, to choose its best

Each pair is one run of Ropeway and one of the peer, one after the other with the same seed, the order alternating;
only one of them is alive at a time, and each has two threads and no prefix cache. What counts is the ratio within a
pair: the table gives the median ratio and its range. Every pair goes to benchmarks/results/ as it ends; --resume goes
on from there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from harness.contestants import PEERS, Contestant, Measurement, Paddock, settings_of
from harness.environments import Environments
from harness.processes import ContestantError
from harness.results import ROOT, markdown_table, new_document, result_path, save, spread
from harness.rows import METRICS, ROWS, Row, metric
from ropeway.catalog import DEFAULT_MODEL, resolve_model

SWEEP_REQUESTS = 96


@dataclass(frozen=True, slots=True)
class Pair:
    """One planned comparison."""

    row: Row
    peer: str
    seed: int

    @property
    def key(self) -> list[Any]:
        return [self.row.name, self.peer, self.seed]


def planned_pairs(args: argparse.Namespace) -> list[Pair]:
    """Seeds outermost, so that a run cut short has something of everything."""
    rows = [ROWS[name] for name in args.rows]
    if args.num_requests is not None:
        rows = [replace(row, num_requests=args.num_requests) for row in rows]
    return [
        Pair(row, peer, seed)
        for seed in args.seeds
        for row in rows
        for peer in row.peers
        if args.peers is None or peer in args.peers
    ]


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


def run_pairs(args: argparse.Namespace, paddock: Paddock) -> int:
    document, path = _document(args)
    done = [[pair["row"], pair["peer"], pair["seed"]] for pair in document["pairs"]]
    pairs = [pair for pair in planned_pairs(args) if pair.key not in done]
    peers = {name: paddock.peer(name, args.settings.get(name)) for name in dict.fromkeys(pair.peer for pair in pairs)}
    ropeway = paddock.ropeway()
    failures = 0
    for number, pair in enumerate(pairs, 1):
        print(f"pair {number} of {len(pairs)}: {pair.row.name}, {pair.peer}, seed {pair.seed}", flush=True)
        order = [ropeway, peers[pair.peer]] if pair.seed % 2 == 0 else [peers[pair.peer], ropeway]
        try:
            measured = {contestant.name: measure(contestant, pair.row, pair.seed) for contestant in order}
        except ContestantError as error:
            failures += 1
            print(f"  not measured: {error}", file=sys.stderr, flush=True)
            continue
        document["pairs"].append(
            {
                "row": pair.row.name,
                "peer": pair.peer,
                "seed": pair.seed,
                "num_requests": pair.row.num_requests,
                "order": [contestant.name for contestant in order],
                "ropeway_run": measured["ropeway"],
                "peer_run": measured[pair.peer],
            }
        )
        save(path, document)
    print(f"\n{format_pairs(document['pairs'])}\n\nall pairs: {path}")
    return 1 if failures else 0


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
        },
    )
    return document | {"pairs": []}, result_path(document)


def format_pairs(pairs: Sequence[dict[str, Any]]) -> str:
    """The table: per row and peer, medians of both, and the median ratio with its range (above 1: Ropeway is ahead)."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pair in pairs:
        groups.setdefault((pair["row"], pair["peer"]), []).append(pair)
    lines = []
    for (row, peer), members in groups.items():
        for name, (label, is_more_better) in METRICS.items():
            values = [
                (pair["ropeway_run"]["figures"][name], pair["peer_run"]["figures"][name])
                for pair in members
                if pair["ropeway_run"]["figures"][name] and pair["peer_run"]["figures"][name]
            ]
            if not values:
                continue
            ratios = [ours / theirs if is_more_better else theirs / ours for ours, theirs in values]
            middle, low, high = spread(ratios)
            lines.append(
                [
                    row,
                    peer,
                    label,
                    f"{statistics.median(ours for ours, _ in values):,.1f}",
                    f"{statistics.median(theirs for _, theirs in values):,.1f}",
                    f"{middle:.2f}",
                    f"{low:.2f}–{high:.2f} ({len(ratios)})",
                ]
            )
    return markdown_table(("row", "peer", "figure", "Ropeway", "peer", "times better", "range (pairs)"), lines)


def run_sweep(args: argparse.Namespace, paddock: Paddock) -> int:
    """Every setting of every chosen peer at c=32, fewer requests: enough to choose by, not to claim with."""
    row = replace(ROWS["c32"], num_requests=args.num_requests or SWEEP_REQUESTS)
    document = new_document("peers-sweep", {"num_requests": row.num_requests, "seed": args.seeds[0]}) | {"runs": []}
    path = result_path(document)
    lines = []
    for peer in args.peers or PEERS:
        for setting in settings_of(peer):
            print(f"{peer}, {setting}", flush=True)
            try:
                run = measure(paddock.peer(peer, setting), row, args.seeds[0])
            except ContestantError as error:
                run = {"error": str(error)}
                print(f"  not measured: {error}", file=sys.stderr, flush=True)
            document["runs"].append({"peer": peer, "setting": setting, **run})
            save(path, document)
            figures = run.get("figures", {})
            lines.append([peer, setting, *(f"{figures[name]:,.1f}" if figures.get(name) else "–" for name in METRICS)])
    print(f"\n{markdown_table(('peer', 'setting', *(label for label, _ in METRICS.values())), lines)}\n\n{path}")
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
    parser.add_argument("--sweep", action="store_true", help="try each peer's settings at c=32 instead")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="go on with the pairs missing from this result file"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the Q4_1 file that Ropeway serves: a name or a path")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".cache" / "peers", help="where peers are installed"
    )
    parser.add_argument("--ropeway-options", default="", help="further flags of `ropeway serve`, as one string")
    args = parser.parse_args()
    args.settings = dict(args.settings)
    args.environments.mkdir(parents=True, exist_ok=True)
    environments = Environments(args.environments.resolve())
    paddock = Paddock(environments, resolve_model(args.model), args.environments, args.ropeway_options.split())
    return run_sweep(args, paddock) if args.sweep else run_pairs(args, paddock)


if __name__ == "__main__":
    sys.exit(main())
