"""`ropeway serve`: flags in, a running server out. The serving itself is in `ropeway.server`."""

from __future__ import annotations

import argparse
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ropeway._version import __version__
from ropeway.catalog import resolve_model
from ropeway.cli.ending import exit_code, one_line
from ropeway.cli.options import add_engine_arguments, add_model_argument, engine_options
from ropeway.cli.server_options import add_server_arguments, server_config
from ropeway.config import EngineConfig, format_bytes
from ropeway.engine.garbage import settled_garbage
from ropeway.errors import RopewayError
from ropeway.server.hangups import Hangups
from ropeway.server.listening import address, bind
from ropeway.server.logs import LogFormat, begin_logging, json_line
from ropeway.server.tls import TlsContext

if TYPE_CHECKING:
    from ropeway.config import EngineFacts

logger = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    """Adds `serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, to clients of OpenAI and Anthropic",
        description="Serves a model over HTTP to clients of OpenAI and Anthropic; GET /docs lists every path.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_serve)
    add_model_argument(parser)
    add_server_arguments(parser)
    add_engine_arguments(parser)


def run_serve(args: argparse.Namespace) -> int:
    """Loads the model and serves it until a signal; 0 after an orderly end, 1 after a second signal."""
    begin_logging(args.log_format, sys.stderr)
    try:
        return _serve(args)
    except (RopewayError, OSError) as error:
        if args.log_format == "text" or args.is_debugging:
            raise  # the command line tells it, as of every command
        logger.critical("%s", one_line(error))
        return exit_code(error)


def _serve(args: argparse.Namespace) -> int:
    hangups = Hangups()
    if args.api_key_file is not None or args.ssl_certfile is not None:
        hangups.watch()  # from before they are read: one that comes while the model loads must not end the process
    # A wrong option is told before anything slow begins.
    engine_config = EngineConfig.from_options(engine_options(args))
    config = server_config(args)
    tls = None if config.tls is None else TlsContext(config.tls)
    traces = None
    if config.otlp_traces_endpoint is not None:
        from ropeway.server.tracing import open_traces

        traces = open_traces(config.otlp_traces_endpoint)
    with bind(args.host, args.port) as sock:
        resolve_model(args.model)  # a download can be interrupted here, on the main thread
        from ropeway.llm import AsyncLLM, prepare_model

        with ThreadPoolExecutor(1) as executor:
            preparing = executor.submit(prepare_model, args.model, engine_config)
            # A third of the time to readiness is this import, and packing weights needs no interpreter lock.
            from ropeway.server.serving import Door, run_server

            llm = AsyncLLM.from_prepared(preparing.result())
        url = address(sock, "http" if tls is None else "https")
        with settled_garbage():
            is_orderly = run_server(
                llm,
                config,
                Door(sock, tls, hangups),
                lambda: _announce(url, llm.facts, args.log_format),
                traces,
            )
    return 0 if is_orderly else 1


def _announce(url: str, facts: EngineFacts, log_format: LogFormat) -> None:
    text = greeting(url, facts)
    if log_format == "json":
        text = json_line(
            "ropeway.serve",
            text.splitlines()[0],
            {
                "url": url,
                "version": __version__,
                "models": list(facts.served_model_names),
                "max_model_len": facts.max_model_len,
                "num_kv_blocks": facts.num_kv_blocks,
                "block_size": facts.block_size,
            },
        )
    print(text, flush=True)


def _pacing_line(facts: EngineFacts) -> str:
    targets = [
        f"{name} {target_s * 1000:g} ms"
        for name, target_s in (("TTFT", facts.slo_ttft_s), ("TPOT", facts.slo_tpot_s))
        if target_s is not None
    ]
    held = f", targets: {', '.join(targets)}" if targets else ""
    return f"{facts.objective}, at most {facts.max_num_batched_tokens} tokens, {facts.max_num_seqs} sequences{held}"


def greeting(url: str, facts: EngineFacts) -> str:
    """What `serve` prints once it accepts connections."""
    num_slots = facts.num_kv_blocks * facts.block_size
    names = ", ".join(facts.served_model_names)
    return (
        f"Ropeway {__version__} serves {names} at {url}\n"
        f"  context       {facts.max_model_len} tokens, prompt and output together\n"
        f"  KV pool       {facts.num_kv_blocks} blocks of {facts.block_size}: {num_slots} tokens, "
        f"{format_bytes(facts.kv_cache_bytes)}\n"
        f"  steps         {_pacing_line(facts)}\n"
        f"Try it:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        '-d \'{"messages": [{"role": "user", "content": "What is a ropeway?"}]}\''
    )
