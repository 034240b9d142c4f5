"""Flags of `ropeway serve` beside the engine's: address, keys, TLS, browsers, limits, the log. Knows no models."""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path
from typing import Any

from ropeway.cli.options import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE
from ropeway.config import parse_bytes
from ropeway.errors import ConfigError
from ropeway.server.config import ServerConfig
from ropeway.server.cors import CorsRules, listed
from ropeway.server.listening import max_connections
from ropeway.server.tenants import KeyTerms, check_key, load_key_file, terms_of_flags
from ropeway.server.tls import TlsFiles

SSL_PASSWORD_VARIABLE = "ROPEWAY_SSL_PASSWORD"


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of the server's own."""
    _add_address(parser.add_argument_group("server"))
    _add_keys(parser.add_argument_group("keys"))
    _add_tls(parser.add_argument_group("TLS and browsers"))
    _add_limits(parser.add_argument_group("limits"))
    _add_batches(parser.add_argument_group("batches"))
    _add_log(parser.add_argument_group("log"))


def _add_address(group: Any) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1; 0.0.0.0 lets other machines in")
    add("--port", type=int, default=8000, help="port to listen on; default: 8000; 0 takes any free one")
    add("--served-model-name", action="append", metavar="NAME", help="name that requests may give; may be repeated, "
        "the first is the one answers carry; default: the model's")  # fmt: skip


def _add_keys(group: Any) -> None:
    keys = group.add_mutually_exclusive_group()
    keys.add_argument("--api-key", action="append", metavar="KEY", help="asked of every request but those for health, "
        "as a bearer token; may be repeated, each is a tenant of its own; default: the one in ROPEWAY_API_KEY, else "
        "nothing is asked")  # fmt: skip
    keys.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys with tenants, weights and rates, as JSON "
        "or TOML, see docs/serving.md; read again on SIGHUP")  # fmt: skip
    group.add_argument("--admin-api-key", metavar="KEY", help="opens /metrics, /pause, /resume and /abort_requests, "
        "which other keys do not; default: the one in ROPEWAY_ADMIN_API_KEY, else they are open where no keys are in "
        "use, and shut where some are")  # fmt: skip


def _add_tls(group: Any) -> None:
    add = group.add_argument
    add("--ssl-certfile", type=Path, metavar="FILE", help="serve over TLS with this certificate, PEM, with those that "
        "lead to its authority; read again on SIGHUP; default: plain HTTP")  # fmt: skip
    add("--ssl-keyfile", type=Path, metavar="FILE", help="its private key, PEM; default: in the certificate's file")
    add("--ssl-keyfile-password", metavar="TEXT", help="of an encrypted private key; default: the one in "
        "ROPEWAY_SSL_PASSWORD, which no list of processes shows")  # fmt: skip
    add("--ssl-ca-certs", type=Path, metavar="FILE", help="authorities of clients' certificates, PEM; clients then "
        "need one")  # fmt: skip
    add("--ssl-cert-reqs", type=int, choices=(0, 1, 2), help="certificates of clients: 0 not asked for, 1 checked "
        "where there is one, 2 required; default: 2 with --ssl-ca-certs, else 0")  # fmt: skip
    add("--allowed-origins", action="append", metavar="ORIGIN", help="pages of this origin may use the server from a "
        "browser; may be repeated, or a JSON list; '*' allows all; default: none")  # fmt: skip
    add("--allowed-methods", action="append", metavar="METHOD", help="which methods they may use; default: all")
    add("--allowed-headers", action="append", metavar="HEADER", help="which headers they may send; default: all")
    add("--allow-credentials", action="store_true", help="they may send cookies, for a proxy that wants some; API keys "
        "do without")  # fmt: skip


def _add_limits(group: Any) -> None:
    add = group.add_argument
    add("--max-body-size", default="8M", metavar="SIZE", help="largest request body, such as 8M; default: 8M; a "
        "larger one is answered 413")  # fmt: skip
    add("--ping-interval", type=float, default=5.0, metavar="SECONDS", help="streams that wait for their first token "
        "get a comment so often, so that nothing on the way hangs up; seconds; default: 5")  # fmt: skip
    add("--shutdown-timeout", type=float, default=30.0, metavar="SECONDS", help="how long running requests may go on "
        "after SIGTERM or SIGINT, seconds; default: 30; then they are aborted; a second signal ends all")  # fmt: skip
    add("--health-timeout", type=float, default=30.0, metavar="SECONDS", help="/health turns red when there is work "
        "and no step has ended for this long, seconds; default: 30")  # fmt: skip
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


def _add_batches(group: Any) -> None:
    add = group.add_argument
    batches = group.add_mutually_exclusive_group()
    batches.add_argument("--batch-dir", type=Path, metavar="DIR", help="where /v1/files and /v1/batches are kept, for "
        "one server at a time; default: ropeway/batches in the user's data directory")  # fmt: skip
    batches.add_argument("--no-batches", action="store_true", help="keep none, and refuse those endpoints")
    add("--max-batch-file-size", default="200M", metavar="SIZE", help="largest file that is uploaded; default: 200M")
    add("--max-batch-storage", default="10G", metavar="SIZE", help="what all files together may take; default: 10G; "
        "then uploads are refused")  # fmt: skip


def _add_log(group: Any) -> None:
    add = group.add_argument
    add("--access-log", action="store_true", help="log a line per request; default: off")
    add("--log-format", choices=("text", "json"), default="text", help="json: an object per line, for machines to "
        "read; default: text")  # fmt: skip
    add("--otlp-traces-endpoint", metavar="URL", help="send a span per request to this OpenTelemetry collector; needs "
        "the packages of docs/serving.md, Traces; default: none")  # fmt: skip


def server_config(args: argparse.Namespace) -> ServerConfig:
    """What the flags ask for. Raises ConfigError where they contradict each other or the files they name are wrong."""
    _check_limits(args)
    admin_api_key = args.admin_api_key
    if admin_api_key is None:
        admin_api_key = os.environ.get(ADMIN_API_KEY_VARIABLE)
    if admin_api_key is not None:
        check_key("--admin-api-key", admin_api_key)
    return ServerConfig(
        api_keys=_api_keys(args),
        api_key_file=args.api_key_file,
        admin_api_key=admin_api_key,
        max_body_bytes=parse_bytes("--max-body-size", args.max_body_size),
        ping_s=args.ping_interval,
        shutdown_timeout_s=args.shutdown_timeout,
        stall_s=args.health_timeout,
        has_access_log=args.access_log,
        tls=_tls_files(args),
        cors=_cors_rules(args),
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        header_timeout_s=args.header_timeout,
        body_timeout_s=args.body_timeout,
        write_timeout_s=args.write_timeout,
        max_unread_bytes=parse_bytes("--max-unread-size", args.max_unread_size),
        max_connections=max_connections(args.max_connections),
        batch_dir=None if args.no_batches else args.batch_dir or default_batch_dir(),
        max_batch_file_bytes=parse_bytes("--max-batch-file-size", args.max_batch_file_size),
        max_batch_storage_bytes=parse_bytes("--max-batch-storage", args.max_batch_storage),
    )


def default_batch_dir() -> Path:
    """Where batches are kept unless told otherwise: in the user's data directory."""
    data_home = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data_home) if os.path.isabs(data_home) else Path.home() / ".local" / "share") / "ropeway" / "batches"


def _check_limits(args: argparse.Namespace) -> None:
    for name, least_s in (
        ("ping_interval", 0.01),
        ("shutdown_timeout", 0),
        ("health_timeout", 0),
        ("header_timeout", 0.01),
        ("body_timeout", 0.01),
        ("write_timeout", 0.01),
    ):
        value = getattr(args, name)
        if not least_s <= value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least_s} seconds, not {value}")
    if args.max_connections is not None and args.max_connections < 1:
        raise ConfigError(f"--max-connections must be at least 1, not {args.max_connections}")


def _api_keys(args: argparse.Namespace) -> dict[str, KeyTerms]:
    if args.api_key_file is not None:
        return load_key_file(args.api_key_file)
    if args.api_key is not None:
        return terms_of_flags(args.api_key)
    variable = os.environ.get(API_KEY_VARIABLE)
    return terms_of_flags(() if variable is None else (variable,))


def _tls_files(args: argparse.Namespace) -> TlsFiles | None:
    if args.ssl_certfile is None:
        for flag in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} does nothing without --ssl-certfile: give that too")
        return None
    password = args.ssl_keyfile_password
    reqs = args.ssl_cert_reqs
    return TlsFiles(
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        keyfile_password=os.environ.get(SSL_PASSWORD_VARIABLE) if password is None else password,
        ca_certs=args.ssl_ca_certs,
        client_certificates=ssl.VerifyMode(2 * (args.ssl_ca_certs is not None) if reqs is None else reqs),
    )


def _cors_rules(args: argparse.Namespace) -> CorsRules | None:
    origins = listed("--allowed-origins", args.allowed_origins or ())
    if not origins:
        for flag in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if getattr(args, flag):
                raise ConfigError(f"--{flag.replace('_', '-')} does nothing without --allowed-origins: give that too")
        return None
    return CorsRules(
        origins=origins,
        methods=listed("--allowed-methods", args.allowed_methods or ()) or ("*",),
        headers=listed("--allowed-headers", args.allowed_headers or ()) or ("*",),
        allows_credentials=args.allow_credentials,
    )
