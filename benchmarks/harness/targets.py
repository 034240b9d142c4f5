"""What must be reached, and whether it was: the last table of a comparison. Runs nothing.

A ratio above 1 means that Ropeway is ahead, for rates and for latencies alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.results import markdown_table, spread
from harness.rows import METRICS

LATENCIES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
OWN_ROW, OWN_BASE_ROW, OWN_RATIO = "c128", "c32", 0.95


@dataclass(frozen=True, slots=True)
class Target:
    """The median ratio of `metric` to `peer` must be at least `ratio`, or above it where `is_strict`."""

    row: str
    peer: str
    metric: str
    ratio: float
    is_strict: bool = False

    def is_met(self, ratio: float) -> bool:
        return ratio > self.ratio if self.is_strict else ratio >= self.ratio

    def __str__(self) -> str:
        return f"{'>' if self.is_strict else '≥'} {self.ratio:g}"


TARGETS = (
    Target("c32", "openvino-int4", "output_tokens_per_s", 3.5),
    Target("c32", "llama-q4_0", "output_tokens_per_s", 4.0),
    Target("c32", "llama-q4_1", "output_tokens_per_s", 7.0),
    *(
        Target("c32", peer, name, 1.0, is_strict=True)
        for peer in ("openvino-int4", "llama-q4_0", "llama-q4_1")
        for name in LATENCIES
    ),
    *(Target("c8", peer, "output_tokens_per_s", 3.0) for peer in ("openvino-int4", "llama-q4_0")),
    Target("c1", "llama-q4_0", "tpot_p50", round(1 / 0.6, 3)),
    *(
        Target("c1", peer, name, 1.0, is_strict=True)
        for peer in ("openvino-int4", "llama-q4_0")
        for name in ("ttft_p50", "ttft_p99")
    ),
    *(Target("c128", peer, "output_tokens_per_s", 3.0) for peer in ("openvino-int4", "llama-q4_0")),
    *(Target(row, "llama-q4_0", "prompt_tokens_per_s", 2.0) for row in ("prompt2k", "prompt8k")),
    Target("llama-1b-c1", "llama-q4_0", "output_tokens_per_s", 1.2),
    Target("llama-1b-c16", "llama-q4_0", "output_tokens_per_s", 3.0),
)


def pairs_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every peer's run beside Ropeway's run of the same row and seed."""
    own = {(run["row"], run["seed"]): run for run in runs if run["contestant"] == "ropeway"}
    return [
        {
            "row": run["row"],
            "peer": run["contestant"],
            "seed": run["seed"],
            "num_requests": run["num_requests"],
            "ratios": _ratios(own[run["row"], run["seed"]]["figures"], run["figures"]),
            "ropeway": own[run["row"], run["seed"]]["figures"],
            "peer_figures": run["figures"],
        }
        for run in runs
        if run["contestant"] != "ropeway" and (run["row"], run["seed"]) in own
    ]


def _ratios(ours: dict[str, float | None], theirs: dict[str, float | None]) -> dict[str, float | None]:
    ratios: dict[str, float | None] = {}
    for name, (_, is_more_better) in METRICS.items():
        our, their = ours[name], theirs[name]
        if our and their:
            ratios[name] = our / their if is_more_better else their / our
        else:
            ratios[name] = None
    return ratios


def format_comparison(runs: Sequence[dict[str, Any]]) -> str:
    """Per row, peer and figure: medians of both, the median ratio, its range, the target and whether it was met."""
    pairs = pairs_of(runs)
    targets = {(target.row, target.peer, target.metric): target for target in TARGETS}
    lines = []
    for row, peer in dict.fromkeys((pair["row"], pair["peer"]) for pair in pairs):
        members = [pair for pair in pairs if (pair["row"], pair["peer"]) == (row, peer)]
        for name, (label, _) in METRICS.items():
            measured = [pair for pair in members if pair["ratios"][name] is not None]
            if not measured:
                continue
            middle, low, high = spread([pair["ratios"][name] for pair in measured])
            target = targets.get((row, peer, name))
            verdict = "" if target is None else "pass" if target.is_met(middle) else "miss"
            ours, theirs = (
                statistics.median(pair[who][name] for pair in measured) for who in ("ropeway", "peer_figures")
            )
            span = f"{low:.2f}–{high:.2f} ({len(measured)})"
            wanted = "" if target is None else str(target)
            lines.append([row, peer, label, f"{ours:,.1f}", f"{theirs:,.1f}", f"{middle:.2f}", span, wanted, verdict])
    lines += _own_line(runs)
    header = ("row", "peer", "figure", "Ropeway", "peer", "times better", "range (pairs)", "target", "")
    return markdown_table(header, lines)


def _own_line(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Ropeway at c=128 beside itself at c=32, within each seed."""
    rates = {
        (run["row"], run["seed"]): run["figures"]["output_tokens_per_s"]
        for run in runs
        if run["contestant"] == "ropeway" and run["row"] in (OWN_ROW, OWN_BASE_ROW)
    }
    pairs = [
        (rate, rates[OWN_BASE_ROW, seed])
        for (row, seed), rate in rates.items()
        if row == OWN_ROW and (OWN_BASE_ROW, seed) in rates
    ]
    if not pairs:
        return []
    middle, low, high = spread([large / small for large, small in pairs])
    label = METRICS["output_tokens_per_s"][0]
    ours, base = (statistics.median(column) for column in zip(*pairs, strict=True))
    verdict = "pass" if middle >= OWN_RATIO else "miss"
    span = f"{low:.2f}–{high:.2f} ({len(pairs)})"
    own = f"own {OWN_BASE_ROW}"
    return [[OWN_ROW, own, label, f"{ours:,.1f}", f"{base:,.1f}", f"{middle:.2f}", span, f"≥ {OWN_RATIO}", verdict]]


# Output tokens/s at c=32 in a first look at the peers, on one machine of this class. Only their proportions mean
# something: a peer that has become much slower beside the others is set up wrong.
FIRST_LOOK = {"llama-q4_1": 44.0, "llama-q4_0": 73.5, "openvino-int4": 87.0, "openvino-int8": 84.0}
LEAST_PROPORTION = 0.85


def doubtful_peers(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each peer that is more than 15 % below its first look at c=32, relative to the other peers."""
    rates = {
        peer: statistics.median(
            run["figures"]["output_tokens_per_s"] for run in runs if (run["row"], run["contestant"]) == ("c32", peer)
        )
        for peer in dict.fromkeys(run["contestant"] for run in runs if run["row"] == "c32")
        if peer in FIRST_LOOK
    }
    found = []
    for peer, rate in rates.items():
        others = [other_rate / FIRST_LOOK[other] for other, other_rate in rates.items() if other != peer]
        if others and rate / FIRST_LOOK[peer] < LEAST_PROPORTION * statistics.median(others):
            proportion = rate / FIRST_LOOK[peer] / statistics.median(others)
            found.append(
                f"{peer} is at {proportion:.2f} of its first look beside the other peers: set up wrong, or disturbed"
            )
    return found
