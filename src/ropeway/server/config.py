"""What the HTTP side is told. Imports no web framework, so that flags can be checked before one is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ropeway.server.cors import CorsRules
from ropeway.server.tenants import KeyTerms
from ropeway.server.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the server.

    api_keys: one of them is asked of every request but those for health; empty asks for nothing. api_key_file: where
    they were read from, to be read again on SIGHUP. admin_api_key: operates the server. max_body_bytes: of one request.
    ping_s: a stream without a token yet gets a comment so often. shutdown_timeout_s: running requests may finish for
    this long. stall_s: /health is red after this long with work but without a step. has_access_log: one line per
    request. tls: None serves plain HTTP. cors: None lets no page of another origin use the server. batch_dir: where
    files and batches are kept; None keeps none. max_batch_file_bytes: of one file that is uploaded.
    max_batch_storage_bytes: of all files together. otlp_traces_endpoint: where spans go; None makes none.
    header_timeout_s, body_timeout_s: a client may take so long to send the headers, and the body: one second more for
    every BODY_BYTES_PER_S of it. write_timeout_s: a client that takes nothing of its answer for so long is cut off.
    max_unread_bytes: of a stream that its client does not read; more end it. max_connections: more are refused.
    """

    api_keys: Mapping[str, KeyTerms] = field(default_factory=dict, repr=False)
    api_key_file: Path | None = None
    admin_api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 8 << 20
    ping_s: float = 5.0
    shutdown_timeout_s: float = 30.0
    stall_s: float = 30.0
    has_access_log: bool = False
    tls: TlsFiles | None = None
    cors: CorsRules | None = None
    otlp_traces_endpoint: str | None = None
    batch_dir: Path | None = None
    max_batch_file_bytes: int = 200 << 20
    max_batch_storage_bytes: int = 10 << 30
    header_timeout_s: float = 20.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    max_unread_bytes: int = 4 << 20
    max_connections: int = 65536
