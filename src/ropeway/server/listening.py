"""The listening socket: bound before anything slow begins. Knows no HTTP."""

from __future__ import annotations

import socket

from ropeway.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that an address in use shows before a model is loaded.

    Raises ConfigError with the remedy.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --port (0 takes any free one)"
        ) from None
    return sock


def address(sock: socket.socket) -> str:
    """http://host:port of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"
