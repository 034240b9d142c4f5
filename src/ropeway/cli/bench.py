"""`ropeway bench …`: flags in, tables and files out. The measuring itself is in `ropeway.bench`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import orjson

from ropeway.bench.report import GOODPUT_LATENCIES, format_failures, format_table, parse_goodput
from ropeway.bench.serve import (
    ServeBenchOptions,
    plot_document,
    result_document,
    run_serve_bench,
    write_document,
)
from ropeway.bench.workload import RAGGED_OUTPUTS, RAGGED_PROMPTS, LengthDistribution, SyntheticWorkload
from ropeway.cli.options import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE, add_model_argument
from ropeway.errors import ConfigError


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)


def add_parser(subparsers: Any) -> None:
    """Adds `bench` and its own subcommands; the parsed namespace carries `run(args) -> exit status`."""
    bench = subparsers.add_parser("bench", help="measure a server, or a step of the engine")
    commands = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_step(commands)


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="load on any OpenAI-compatible server",
        description="Sends ragged token-id prompts (or a JSONL of prompts) to /v1/completions of any OpenAI-compatible "
        "server and states throughput and latency together. Exit status 1 if any request failed or was answered with "
        "the wrong number of tokens.",
        formatter_class=_HelpFormatter,
    )
    parser.set_defaults(run=run_serve)
    _add_target(parser)
    _add_pacing(parser)
    _add_workload(parser)
    _add_output(parser)


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    group.add_argument(
        "--base-url", "--url", default="http://127.0.0.1:8000", metavar="URL", help="the server, with or without /v1"
    )
    group.add_argument("--model", help="model name to ask for; the first of /v1/models if not given")
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token; that of ROPEWAY_API_KEY, or none, if "
        "not given")  # fmt: skip
    group.add_argument("--admin-api-key", metavar="KEY", help="sent to /metrics, for the counters of preemptions; that "
        "of ROPEWAY_ADMIN_API_KEY, or the other key, if not given")  # fmt: skip
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="longest wait for one answer, s")
    group.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="an object whose fields are added to every request body"
    )
    group.add_argument(
        "--respect-eos",
        action="store_true",
        help="let answers end at the end token; without it ignore_eos is sent and every answer must be full length",
    )


def _add_pacing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pacing")
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="C",
        help="closed loop: requests in flight; several values make a sweep; 32 if neither this nor a rate is given",
    )
    pace.add_argument(
        "--request-rate",
        type=float,
        nargs="+",
        metavar="R",
        help="open loop: Poisson arrivals per second, latencies counted from the due time; several make a sweep",
    )
    group.add_argument(
        "--num-requests", type=int, metavar="N", help="requests per run; max(48, 8·C), above C=32 4·C, if not given"
    )
    group.add_argument("--num-warmup-requests", type=int, default=1, metavar="N", help="requests before measuring")
    group.add_argument("--seed", type=int, default=0, help="of lengths, token ids and arrivals")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='JSONL of {"prompt": text or token ids, "max_tokens": N}; random prompts of ragged length if not given',
    )
    group.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="output tokens of --prompts lines that do not say"
    )
    for name, lengths in (("prompt", RAGGED_PROMPTS), ("output", RAGGED_OUTPUTS)):
        group.add_argument(
            f"--{name}-mean", type=float, default=lengths.mean, metavar="TOKENS", help=f"mean {name} length, tokens"
        )
        group.add_argument(
            f"--{name}-sigma",
            type=float,
            default=lengths.sigma,
            metavar="S",
            help=f"sigma of the lognormal {name} length; 0 makes all equal",
        )
        group.add_argument(
            f"--{name}-max", type=int, default=lengths.maximum, metavar="TOKENS", help=f"longest {name}, tokens"
        )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=32000,
        metavar="N",
        help="random token ids are below this; at most the model's",
    )
    group.add_argument("--first-token-id", type=int, default=100, metavar="N", help="random token ids start here")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"also count requests within all these limits in ms; names: {', '.join(GOODPUT_LATENCIES)}",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures and options here")
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="write tokens/s against each latency here, as .svg or .html"
    )


def _add_step(commands: Any) -> None:
    parser = commands.add_parser(
        "step",
        help="how long a step takes, and with --profile where its time goes",
        description="Runs steps of a chosen batch, context and prefill chunk on an engine in this process, with the "
        "text side of the server behind it.",
        formatter_class=_HelpFormatter,
    )
    parser.set_defaults(run=run_step)
    add_model_argument(parser, "--model")
    add = parser.add_argument
    add("--batch", type=int, nargs="+", default=[32], metavar="N", help="sequences that decode; several are measured "
        "one after the other")  # fmt: skip
    add("--context", type=int, default=256, metavar="TOKENS", help="tokens behind each of them when measuring begins")
    add("--prefill-tokens", type=int, default=0, metavar="TOKENS", help="tokens of a fresh prompt in every step")
    add("--num-threads", type=int, metavar="N", help="threads that compute; one per usable core if not given")
    add("--num-steps", type=int, default=32, metavar="N", help="steps to measure")
    add("--seed", type=int, default=0, help="of the token ids")
    add("--profile", action="store_true", help="print where the time goes: op by op, and Python")
    add("--json", type=Path, metavar="FILE", help="write all figures and options here")
    add("--plot", type=Path, metavar="FILE", help="write a stacked bar per batch here, as .svg")


def run_step(args: argparse.Namespace) -> int:
    """Runs `bench step`; 0."""
    from ropeway.bench.step import (  # loads an engine's worth of modules, which `bench serve` does without
        StepBenchOptions,
        format_profile,
        format_steps,
        plot_profiles,
        profile_document,
        run_step_bench,
    )

    if args.plot is not None and args.plot.suffix != ".svg":
        raise ConfigError(f"--plot {args.plot} names no known format: end it in .svg")
    least = {"--context": args.context, "--num-steps": args.num_steps} | {"--batch": min(args.batch)}
    for name, value in least.items():
        if value < 1:
            raise ConfigError(f"{name} {value} is below the least that makes sense, 1")
    for name, value in {"--prefill-tokens": args.prefill_tokens, "--seed": args.seed}.items():
        if value < 0:
            raise ConfigError(f"{name} {value} is below the least that makes sense, 0")
    options = StepBenchOptions(
        model=args.model,
        batches=tuple(args.batch),
        context=args.context,
        prefill_tokens=args.prefill_tokens,
        num_threads=args.num_threads,
        num_steps=args.num_steps,
        seed=args.seed,
    )
    profiles = run_step_bench(options, lambda text: print(text, file=sys.stderr, flush=True))
    print(format_steps(profiles))
    for profile in profiles if args.profile else ():
        print(f"\n{format_profile(profile)}")
    if args.json is not None:
        write_document(args.json, orjson.dumps(profile_document(options, profiles), option=orjson.OPT_INDENT_2))
    if args.plot is not None:
        write_document(args.plot, plot_profiles(options.model, profiles))
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """Runs `bench serve`; 0 if every request was answered as asked, else 1."""
    if args.plot is not None and args.plot.suffix not in (".svg", ".html"):
        raise ConfigError(f"--plot {args.plot} names no known format: end it in .svg or .html")
    options = _serve_options(args)
    summaries = run_serve_bench(options)
    print(format_table(summaries))
    if args.json is not None:
        write_document(args.json, orjson.dumps(result_document(options, summaries), option=orjson.OPT_INDENT_2))
    if args.plot is not None:
        title = f"Throughput and latency of {options.model or options.base_url}"
        write_document(args.plot, plot_document(title, summaries, is_html=args.plot.suffix == ".html"))
    failures = format_failures(summaries)
    if failures:
        print(failures, file=sys.stderr)
    return 1 if failures else 0


def _serve_options(args: argparse.Namespace) -> ServeBenchOptions:
    for name, values, smallest in (
        ("--concurrency", args.concurrency or [], 1),
        ("--num-requests", [args.num_requests] if args.num_requests is not None else [], 1),
        ("--num-warmup-requests", [args.num_warmup_requests], 0),
        ("--max-tokens", [args.max_tokens], 1),
        ("--seed", [args.seed], 0),
    ):
        for value in values:
            if value < smallest:
                raise ConfigError(f"{name} {value} is below the least that makes sense, {smallest}")
    return ServeBenchOptions(
        base_url=args.base_url,
        model=args.model,
        api_key=os.environ.get(API_KEY_VARIABLE) if args.api_key is None else args.api_key,
        admin_api_key=os.environ.get(ADMIN_API_KEY_VARIABLE) if args.admin_api_key is None else args.admin_api_key,
        concurrencies=tuple(args.concurrency or ()) if args.request_rate or args.concurrency else (32,),
        request_rates=tuple(args.request_rate or ()),
        num_requests=args.num_requests,
        num_warmup_requests=args.num_warmup_requests,
        seed=args.seed,
        workload=SyntheticWorkload(
            prompt_lengths=LengthDistribution(args.prompt_mean, args.prompt_sigma, args.prompt_max),
            output_lengths=LengthDistribution(args.output_mean, args.output_sigma, args.output_max),
            vocab_size=args.vocab_size,
            first_token_id=args.first_token_id,
        ),
        prompts_path=args.prompts,
        default_max_tokens=args.max_tokens,
        ignore_eos=not args.respect_eos,
        extra_body=_parse_extra_body(args.extra_body),
        goodput_limits_ms=parse_goodput(args.goodput),
        timeout_s=args.timeout,
    )


def _parse_extra_body(text: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError("--extra-body is not a JSON object: write it like '{\"cache_prompt\": false}'")
    return fields
