"""`ropeway serve`: flags in, a running server out. The serving itself is in `ropeway.server`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropeway._version import __version__
from ropeway.catalog import resolve_model
from ropeway.cli.options import (
    add_engine_arguments,
    add_model_argument,
    engine_options,
)
from ropeway.config import EngineConfig, format_bytes, parse_bytes
from ropeway.engine.garbage import settled_garbage
from ropeway.errors import ConfigError
from ropeway.server.config import ServerConfig
from ropeway.server.listening import address, bind, max_connections
from ropeway.server.log_context import RequestIdFilter
from ropeway.server.tenants import check_key, load_key_file, terms_of_flags

if TYPE_CHECKING:
    from ropeway.config import EngineFacts


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
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1; 0.0.0.0 lets other machines in")
    add("--port", type=int, default=8000, help="port to listen on; default: 8000; 0 takes any free one")
    add("--served-model-name", action="append", metavar="NAME", help="name that requests may give; may be repeated, "
        "the first is the one answers carry; default: the model's")  # fmt: skip
    keys = group.add_mutually_exclusive_group()
    keys.add_argument("--api-key", action="append", metavar="KEY", help="asked of every request but those for health, "
        "as a bearer token; may be repeated, each is a tenant of its own; default: nothing is asked")  # fmt: skip
    keys.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys with tenants, weights and rates, as JSON "
        "or TOML, see docs/serving.md; read again on SIGHUP")  # fmt: skip
    add("--admin-api-key", metavar="KEY", help="opens /metrics, /pause, /resume and /abort_requests, which other keys "
        "do not; default: they are open where no keys are in use, else shut")  # fmt: skip
    add("--max-body-size", default="8M", metavar="SIZE", help="largest request body, such as 8M; default: 8M; a "
        "larger one is answered 413")  # fmt: skip
    add("--ping-interval", type=float, default=5.0, metavar="SECONDS", help="streams that wait for their first token "
        "get a comment so often, so that nothing on the way hangs up; seconds; default: 5")  # fmt: skip
    add("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS", help="how long running requests may go on "
        "after SIGTERM or SIGINT, seconds; default: 30; then they are aborted; a second signal ends all")  # fmt: skip
    add("--health-timeout", type=float, default=30.0, metavar="SECONDS", help="/health turns red when there is work "
        "and no step has ended for this long, seconds; default: 30")  # fmt: skip
    batches = group.add_mutually_exclusive_group()
    batches.add_argument("--batch-dir", type=Path, metavar="DIR", help="where /v1/files and /v1/batches are kept, for "
        "one server at a time; default: ropeway/batches in the user's data directory")  # fmt: skip
    batches.add_argument("--no-batches", action="store_true", help="keep none, and refuse those endpoints")
    add("--max-batch-file-size", default="200M", metavar="SIZE", help="largest file that is uploaded; default: 200M")
    add("--max-batch-storage", default="10G", metavar="SIZE", help="what all files together may take; default: 10G; "
        "then uploads are refused")  # fmt: skip
    add("--header-timeout", type=float, default=20.0, metavar="SECONDS", help="how long a client may take to send the "
        "headers of a request; default: 20; then it is answered 408")  # fmt: skip
    add("--body-timeout", type=float, default=30.0, metavar="SECONDS", help="how long a client may take to send the "
        "body, and a second more for every 64 KiB of it; default: 30; then it is answered 408")  # fmt: skip
    add("--write-timeout", type=float, default=60.0, metavar="SECONDS", help="a client that takes nothing of its "
        "answer for this long is cut off, and what it asked for aborted; default: 60")  # fmt: skip
    add("--max-unread-size", default="4M", metavar="SIZE", help="how much of a stream is kept for a client that does "
        "not read it, such as 4M; default: 4M; more end the stream with an error")  # fmt: skip
    add("--max-connections", type=int, metavar="N", help="most connections open at once, more are answered 503; "
        "default: as many as the limit of open files leaves, which is raised as far as it may be")  # fmt: skip
    add("--access-log", action="store_true", help="log a line per request; default: off")
    add_engine_arguments(parser)


def run_serve(args: argparse.Namespace) -> int:
    """Loads the model and serves it until a signal; 0 after an orderly end, 1 after a second signal."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    form = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"
    logging.basicConfig(level=logging.INFO, handlers=[handler], format=form)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if not 0.01 <= args.ping_interval < float("inf"):
        raise ConfigError(f"--ping-interval must be at least 0.01 seconds, not {args.ping_interval}")
    for flag, value in (("--shutdown-timeout", args.shutdown_timeout), ("--health-timeout", args.health_timeout)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{flag} must be a number of seconds, 0 or more, not {value}")
    for flag, value in (
        ("--header-timeout", args.header_timeout),
        ("--body-timeout", args.body_timeout),
        ("--write-timeout", args.write_timeout),
    ):
        if not 0.01 <= value < float("inf"):
            raise ConfigError(f"{flag} must be at least 0.01 seconds, not {value}")
    if args.max_connections is not None and args.max_connections < 1:
        raise ConfigError(f"--max-connections must be at least 1, not {args.max_connections}")
    max_body_bytes = parse_bytes("--max-body-size", args.max_body_size)
    options = engine_options(args)
    engine_config = EngineConfig.from_options(options)  # a wrong option is told before anything slow begins

    api_keys = terms_of_flags(args.api_key or ()) if args.api_key_file is None else load_key_file(args.api_key_file)
    if args.admin_api_key is not None:
        check_key("--admin-api-key", args.admin_api_key)
    config = ServerConfig(
        api_keys=api_keys,
        api_key_file=args.api_key_file,
        admin_api_key=args.admin_api_key,
        max_body_bytes=max_body_bytes,
        ping_s=args.ping_interval,
        shutdown_timeout_s=args.shutdown_timeout,
        stall_s=args.health_timeout,
        has_access_log=args.access_log,
        batch_dir=None if args.no_batches else args.batch_dir or default_batch_dir(),
        max_batch_file_bytes=parse_bytes("--max-batch-file-size", args.max_batch_file_size),
        max_batch_storage_bytes=parse_bytes("--max-batch-storage", args.max_batch_storage),
        header_timeout_s=args.header_timeout,
        body_timeout_s=args.body_timeout,
        write_timeout_s=args.write_timeout,
        max_unread_bytes=parse_bytes("--max-unread-size", args.max_unread_size),
        max_connections=max_connections(args.max_connections),
    )
    with bind(args.host, args.port) as sock:
        resolve_model(args.model)  # a download can be interrupted here, on the main thread
        from ropeway.llm import AsyncLLM, prepare_model

        with ThreadPoolExecutor(1) as executor:
            preparing = executor.submit(prepare_model, args.model, engine_config)
            # A third of the time to readiness is this import, and packing weights needs no interpreter lock.
            from ropeway.server.serving import run_server

            llm = AsyncLLM.from_prepared(preparing.result())
        url = address(sock)
        with settled_garbage():
            is_orderly = run_server(llm, config, sock, on_ready=lambda: print(greeting(url, llm.facts), flush=True))
    return 0 if is_orderly else 1


def default_batch_dir() -> Path:
    """Where batches are kept unless told otherwise: in the user's data directory."""
    data_home = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data_home) if os.path.isabs(data_home) else Path.home() / ".local" / "share") / "ropeway" / "batches"


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
