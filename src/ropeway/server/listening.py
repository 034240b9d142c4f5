"""The listening socket, bound before anything slow begins, and how many connections may be open. Knows no HTTP."""

from __future__ import annotations

import logging
import resource
import socket

from ropeway.errors import ConfigError

logger = logging.getLogger(__name__)

# Files that are open beside connections: the model, logs, and what a request may open.
NUM_OTHER_FILES = 128
FEW_CONNECTIONS = 1024
MAX_CONNECTIONS = 65536
# The kernel holds twice so much of an answer that its client does not read; by itself it would go up to some megabytes.
SEND_BUFFER_BYTES = 128 << 10


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that an address in use shows before a model is loaded.

    Raises ConfigError with the remedy.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # of every connection it accepts
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --port (0 takes any free one)"
        ) from None
    return sock


def max_connections(wanted: int | None) -> int:
    """How many connections may be open: as many as wanted, or as the limit of open files leaves; it is raised as far
    as this process may.

    Raises ConfigError where it does not leave as many as wanted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return wanted or MAX_CONNECTIONS
    room = max(1, hard - NUM_OTHER_FILES)
    if wanted is not None and wanted > room:
        raise ConfigError(
            f"--max-connections {wanted} needs {wanted + NUM_OTHER_FILES} open files, but this process may open "
            f"{hard}: ask for fewer, or raise the limit (ulimit -Hn, LimitNOFILE=)"
        )
    if wanted is None and room < FEW_CONNECTIONS:
        logger.warning(
            "this process may open %d files, so at most %d connections are taken; raise the limit with ulimit -Hn or "
            "LimitNOFILE=", hard, room,
        )  # fmt: skip
    return wanted or min(room, MAX_CONNECTIONS)


def address(sock: socket.socket, scheme: str = "http") -> str:
    """scheme://host:port of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"{scheme}://{host}:{port}"
