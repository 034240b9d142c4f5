"""What the HTTP side is told. Imports no web framework, so that flags can be checked before one is loaded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the server.

    api_key: asked of every /v1 request; None asks for nothing. max_body_bytes: of one request.
    shutdown_timeout_s: running requests may finish for this long. stall_s: /health is red after this long with work but
    without a step. has_access_log: one line per request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body_bytes: int = 8 << 20
    shutdown_timeout_s: float = 30.0
    stall_s: float = 30.0
    has_access_log: bool = False
