"""Experiments in virtual time: points measured on all cores, saved as they come, resumed where they stopped.

Knows no experiment; each gives its points and what to measure at one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from harness import results
from harness.results import save
from ropeway.sim.cost_model import CostModel
from ropeway.sim.simulator import Passage

Point = Mapping[str, Hashable]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every experiment has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the traffic and of the noise of step times")
    parser.add_argument("--jobs", type=int, default=2, help="points measured at once")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with the points missing from this file")
    parser.add_argument("--real", action="store_true", help="repeat one point on the real engine, beside the simulated")
    return parser


def open_document(args: argparse.Namespace, benchmark: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """The document that is resumed, or a new one; and where it is saved."""
    return results.open_document(args.resume, benchmark, {"seed": args.seed, **options}, "points")


def run_points(
    document: dict[str, Any],
    path: Path,
    points: Sequence[Point],
    measure: Callable[[Point], dict[str, Any]],
    num_jobs: int,
) -> None:
    """Measures every point that the document does not hold yet, and saves it after each.

    measure: a function of a module, since it runs in other processes; what it returns is saved beside the point.
    """
    done = {_key(item["point"]) for item in document["points"]}
    missing = [point for point in points if _key(point) not in done]
    start_s = time.monotonic()
    with ProcessPoolExecutor(max(1, num_jobs)) as executor:
        futures = {executor.submit(measure, point): point for point in missing}
        for number, future in enumerate(as_completed(futures), 1):
            point, result = futures[future], future.result()
            document["points"].append({"point": dict(point), **result})
            save(path, document)
            told = "  ".join(f"{name} {_short(value)}" for name, value in result.items() if not _is_nested(value))
            print(f"{number:>3} of {len(missing)}: {' '.join(map(_short, point.values())):<40} {told}", flush=True)
    document["wall_s"] = document.get("wall_s", 0.0) + time.monotonic() - start_s
    save(path, document)


def find(document: Mapping[str, Any], **point: Hashable) -> dict[str, Any]:
    """The one result at a point."""
    (item,) = find_all(document, **point)
    return item


def find_all(document: Mapping[str, Any], **point: Hashable) -> list[dict[str, Any]]:
    """Every result whose point has these values."""
    return [item for item in document["points"] if point.items() <= item["point"].items()]


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of the values do not exceed (nearest rank); nan of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def ttfts_s(passages: Sequence[Passage]) -> list[float]:
    """Times to first token, of those that got one."""
    return [passage.ttft_s for passage in passages if passage.first_token_s is not None]


def verdict(name: str, value: float, limit: float, *, is_at_most: bool) -> dict[str, Any]:
    """One target: what was asked, what was measured, whether it holds. Printed as a line by `tell`."""
    return {
        "target": name,
        "value": value,
        "limit": limit,
        "is_at_most": is_at_most,
        "holds": value <= limit if is_at_most else value >= limit,
    }


def tell(document: dict[str, Any], path: Path, verdicts: Sequence[dict[str, Any]]) -> int:
    """Saves and prints the verdicts; the exit code: 1 where one does not hold."""
    document["verdicts"] = list(verdicts)
    save(path, document)
    for item in verdicts:
        sign = "<=" if item["is_at_most"] else ">="
        mark = "holds " if item["holds"] else "MISSED"
        print(f"{mark}  {item['target']}: {item['value']:.4g} {sign} {item['limit']:.4g}")
    print(path)
    return 0 if all(item["holds"] for item in verdicts) else 1


def prior_of(cost: CostModel) -> dict[str, float]:
    """What a calibration at start would find on a machine of this cost, as fields of a recipe."""
    first_s, middle_s, last_s = cost.token_s
    return {
        "step_fixed_s": cost.fixed_s,
        "step_token_s": middle_s,
        "step_later_token_s": last_s,
        "step_pair_s": cost.pair_s,
        "step_row_s": cost.row_s,
    }


def _key(point: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(point.items()))


def _is_nested(value: object) -> bool:
    return isinstance(value, dict | list)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
