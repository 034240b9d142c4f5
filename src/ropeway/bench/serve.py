"""`ropeway bench serve`: a sweep of runs against one server, from options to files. Knows what a user asks for."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop
from tqdm import tqdm

from ropeway._version import __version__
from ropeway.bench.client import Client, ClientError, Endpoint
from ropeway.bench.load import LoadOptions, RequestRecord, Run, run_load
from ropeway.bench.plot import Panel, Series, render_html, render_svg
from ropeway.bench.report import LATENCIES, Summary, format_table, summarise
from ropeway.bench.server_counters import counters_problem
from ropeway.bench.workload import (
    BenchRequest,
    SyntheticWorkload,
    default_num_requests,
    load_requests,
    poisson_arrivals_s,
)
from ropeway.errors import ConfigError, RopewayError


class BenchError(RopewayError):
    """The server under test cannot be reached or does not answer as an OpenAI-compatible server does."""


@dataclass(frozen=True, slots=True)
class ServeBenchOptions:
    """What to send where. `concurrencies` (closed loop) and `request_rates` (Poisson arrivals per second) exclude each
    other; each value is one run of the sweep."""

    base_url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    concurrencies: tuple[int, ...] = ()
    request_rates: tuple[float, ...] = ()
    num_requests: int | None = None
    num_warmup_requests: int = 1
    seed: int = 0
    workload: SyntheticWorkload = field(default_factory=SyntheticWorkload)
    prompts_path: Path | None = None
    default_max_tokens: int = 64
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    goodput_limits_ms: dict[str, float] = field(default_factory=dict)
    timeout_s: float = 600.0


def run_serve_bench(options: ServeBenchOptions) -> list[Summary]:
    """Runs the sweep, one summary per concurrency or request rate. Raises: ConfigError, BenchError."""
    return uvloop.run(_sweep(options))


async def _sweep(options: ServeBenchOptions) -> list[Summary]:
    client = Client(
        Endpoint.parse(options.base_url),
        api_key=options.api_key,
        admin_api_key=options.admin_api_key,
        timeout_s=options.timeout_s,
    )
    try:
        problem = await counters_problem(client)
        if problem is not None:
            print(problem, file=sys.stderr)
        model = options.model or await _served_model(client, options.base_url)
        load_options = LoadOptions(model=model, ignore_eos=options.ignore_eos, extra_body=options.extra_body)
        await _warm_up(client, options, load_options)
        runs = [(f"c={value}", value, None) for value in options.concurrencies]
        rates = [(f"{value:g} req/s", None, value) for value in options.request_rates]
        return [
            await _run_one(client, options, load_options, label, concurrency, rate)
            for label, concurrency, rate in [*runs, *rates]
        ]
    finally:
        await client.close()


async def _run_one(
    client: Client,
    options: ServeBenchOptions,
    load_options: LoadOptions,
    label: str,
    concurrency: int | None,
    request_rate: float | None,
) -> Summary:
    requests = _requests(options, concurrency)
    arrivals_s = poisson_arrivals_s(request_rate, len(requests), options.seed) if request_rate is not None else None
    with _progress(label, requests) as on_finish:
        run: Run = await run_load(
            client, requests, load_options, arrivals_s=arrivals_s, concurrency=concurrency, on_finish=on_finish
        )
    return summarise(run, label, options.goodput_limits_ms or None)


def _requests(options: ServeBenchOptions, concurrency: int | None) -> list[BenchRequest]:
    if options.prompts_path is not None:
        requests = load_requests(options.prompts_path, options.default_max_tokens)
        return requests[: options.num_requests]
    count = options.num_requests or default_num_requests(concurrency or 32)
    return options.workload.requests(count, options.seed)


async def _served_model(client: Client, base_url: str) -> str:
    try:
        answer = orjson.loads(await client.get("/v1/models"))
        return str(answer["data"][0]["id"])
    except ClientError as error:
        raise BenchError(f"no model list from {base_url}: {error}; is a server running there?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{base_url}/v1/models is not a list of models ({error}): name one with --model") from error


async def _warm_up(client: Client, options: ServeBenchOptions, load_options: LoadOptions) -> None:
    """Unmeasured requests, from a seed no run uses, so that first-time costs and any prefix cache stay out."""
    if not options.num_warmup_requests:
        return
    warmup = SyntheticWorkload(
        vocab_size=options.workload.vocab_size, first_token_id=options.workload.first_token_id
    ).requests(options.num_warmup_requests, seed=2**31 + options.seed)
    run = await run_load(client, warmup, load_options, concurrency=options.num_warmup_requests)
    for record in run.records:
        if record.error is not None:
            raise BenchError(f"a warm-up request to {options.base_url} failed: {record.error}")


@contextmanager
def _progress(label: str, requests: Sequence[BenchRequest]) -> Iterator[Any]:
    """A bar over the output tokens of finished requests, on a terminal only."""
    total = sum(request.max_tokens for request in requests)
    with tqdm(total=total, desc=label, unit="tok", disable=None, file=sys.stderr, mininterval=0.5) as bar:

        def on_finish(record: RequestRecord) -> None:
            bar.update(record.num_output_tokens)

        yield on_finish


def result_document(options: ServeBenchOptions, summaries: Sequence[Summary]) -> dict[str, Any]:
    """Everything needed to read the figures again: when, with what, and how it went. The API keys stay out."""
    asked = asdict(options)
    del asked["api_key"], asked["admin_api_key"]
    asked["prompts_path"] = str(options.prompts_path) if options.prompts_path else None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ropeway_version": __version__,
        "options": asked,
        "runs": [summary.to_dict() for summary in summaries],
    }


def plot_document(title: str, summaries: Sequence[Summary], *, is_html: bool) -> str:
    """Output tokens/s against each latency, a line per percentile, a point per run: SVG, or a page with the table."""
    panels = [
        Panel(
            title=f"{name.upper()}: {meaning}",
            x_label=f"{name.upper()}, ms",
            y_label="output tokens/s",
            series=tuple(_percentile_series(summaries, name, point) for point in ("p50", "p90", "p99")),
        )
        for name, meaning in LATENCIES.items()
    ]
    svg = render_svg(title, panels)
    return render_html(title, svg, format_table(summaries)) if is_html else svg


def _percentile_series(summaries: Sequence[Summary], name: str, point: str) -> Series:
    measured = [
        (value, summary.output_tokens_per_s, summary.label)
        for summary in summaries
        if (value := getattr(getattr(summary, name), point)) is not None
    ]
    return Series(
        name=point,
        points=tuple((value, rate) for value, rate, _ in measured),
        notes=tuple(label for _, _, label in measured),
        is_labelled=point == "p50",
    )


def write_document(path: Path, text: str | bytes) -> None:
    """Raises: ConfigError when the file cannot be written."""
    try:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
