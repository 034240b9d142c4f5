"""Turns the records of a run into figures: throughput and latency together, goodput, failures. Owns the definitions.

* Only requests answered as asked count, in tokens and in latencies; the rest are counted as failures by reason.
* Throughput is their tokens over the wall time from the first send to the last answer, ramp-up and drain included.
* Percentiles interpolate linearly between the closest ranks (Hyndman and Fan's type 7, numpy's default).
* TTFT, TPOT and E2EL are per request; ITL pools every gap between chunks that show text, of all requests. A server that
  puts several tokens in a chunk therefore has fewer, longer ITL gaps: compare its TPOT.
* Goodput is the rate of requests that meet every given limit.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ropeway.bench.load import RequestRecord, Run
from ropeway.errors import ConfigError

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "gap between chunks",
    "e2el": "end-to-end latency",
}
GOODPUT_LATENCIES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one latency, in milliseconds; all None when nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @staticmethod
    def of_seconds(samples: Sequence[float]) -> Percentiles:
        if not len(samples):
            return Percentiles(None, None, None, None)
        milliseconds = np.asarray(samples) * 1e3
        p50, p90, p99 = (float(value) for value in np.percentile(milliseconds, (50, 90, 99)))
        return Percentiles(float(milliseconds.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met `limits_ms`: their number and rate."""

    limits_ms: dict[str, float]
    num_requests: int
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Latencies in milliseconds, rates per second of wall time."""

    label: str
    num_requests: int
    num_failed: int
    failures: dict[str, int]
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles
    e2el: Percentiles
    goodput: Goodput | None
    num_preemptions: int | None
    num_recomputed_tokens: int | None
    client_cpu_us_per_token: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(run: Run, label: str, goodput_limits_ms: dict[str, float] | None = None) -> Summary:
    """The figures of `run`."""
    good = [record for record in run.records if record.error is None]
    failures = collections.Counter(record.error for record in run.records if record.error is not None)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in good)
    num_output_tokens = sum(record.num_output_tokens for record in good)
    tpots_s = [tpot for record in good if (tpot := record.tpot_s) is not None]
    gaps_s = np.concatenate([np.diff(record.chunk_times_s) for record in good]) if good else np.empty(0)
    counters = run.server_counters
    return Summary(
        label=label,
        num_requests=len(run.records),
        num_failed=len(run.records) - len(good),
        failures=dict(failures.most_common()),
        duration_s=run.duration_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        output_tokens_per_s=num_output_tokens / run.duration_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) / run.duration_s,
        requests_per_s=len(good) / run.duration_s,
        ttft=Percentiles.of_seconds([record.ttft_s for record in good]),
        tpot=Percentiles.of_seconds(tpots_s),
        itl=Percentiles.of_seconds(gaps_s.tolist()),
        e2el=Percentiles.of_seconds([record.e2el_s for record in good]),
        goodput=_goodput(good, goodput_limits_ms, run.duration_s) if goodput_limits_ms else None,
        num_preemptions=counters.num_preemptions if counters else None,
        num_recomputed_tokens=counters.num_recomputed_tokens if counters else None,
        client_cpu_us_per_token=run.client_cpu_s / num_output_tokens * 1e6 if num_output_tokens else None,
    )


def _goodput(records: Sequence[RequestRecord], limits_ms: dict[str, float], duration_s: float) -> Goodput:
    def is_met(record: RequestRecord) -> bool:
        measured_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
        return all(measured_s[name] * 1e3 <= limit for name, limit in limits_ms.items())

    count = sum(map(is_met, records))
    return Goodput(dict(limits_ms), count, count / duration_s)


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """Reads limits written as ttft:500 tpot:100 (milliseconds). Raises: ConfigError."""
    limits: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in GOODPUT_LATENCIES or not limit > 0:
            raise ConfigError(
                f"{item!r} is not a goodput limit: expected NAME:MILLISECONDS with NAME one of "
                f"{', '.join(GOODPUT_LATENCIES)}, for example ttft:500"
            )
        limits[name] = limit
    return limits


def format_table(summaries: Sequence[Summary]) -> str:
    """One column per run, one row per figure."""
    rows: list[tuple[str, list[str]]] = [("", [summary.label for summary in summaries])]

    def add(name: str, values: Sequence[float | int | None], digits: int) -> None:
        rows.append((name, ["–" if value is None else f"{value:,.{digits}f}" for value in values]))

    add("requests", [s.num_requests for s in summaries], 0)
    add("failed", [s.num_failed for s in summaries], 0)
    add("duration, s", [s.duration_s for s in summaries], 1)
    add("output tokens/s", [s.output_tokens_per_s for s in summaries], 1)
    add("total tokens/s", [s.total_tokens_per_s for s in summaries], 1)
    add("requests/s", [s.requests_per_s for s in summaries], 2)
    for name in LATENCIES:
        for point in ("p50", "p90", "p99"):
            values = [getattr(getattr(summary, name), point) for summary in summaries]
            add(f"{name.upper()} {point}, ms", values, 1)
    if any(s.goodput for s in summaries):
        limits = next(s.goodput for s in summaries if s.goodput).limits_ms
        named = " ".join(f"{name}≤{limit:g}ms" for name, limit in limits.items())
        add(f"goodput, requests/s ({named})", [s.goodput.requests_per_s if s.goodput else None for s in summaries], 2)
    if any(s.num_preemptions is not None for s in summaries):
        add("preemptions", [s.num_preemptions for s in summaries], 0)
    if any(s.num_recomputed_tokens is not None for s in summaries):
        add("recomputed tokens", [s.num_recomputed_tokens for s in summaries], 0)
    add("client CPU, µs/token", [s.client_cpu_us_per_token for s in summaries], 1)
    return _align(rows)


def _align(rows: Sequence[tuple[str, list[str]]]) -> str:
    name_width = max(len(name) for name, _ in rows)
    width = max(len(cell) for _, cells in rows for cell in cells)
    return "\n".join(f"{name:<{name_width}}" + "".join(f"  {cell:>{width}}" for cell in cells) for name, cells in rows)


def format_failures(summaries: Sequence[Summary]) -> str:
    """One line per run and reason; empty when nothing failed."""
    return "\n".join(
        f"{summary.label}: {count} failed: {reason}"
        for summary in summaries
        for reason, count in summary.failures.items()
    )
