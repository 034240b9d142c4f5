"""Counts of what goes over the sockets: connections, requests by route and status, clients that were too slow.

Plain numbers, written and read on the event loop. Knows no engine.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

# What a client was doing when it was given up: sending its headers, sending its body, or reading its answer.
Phase = Literal["headers", "body", "answer"]
PHASES: tuple[Phase, ...] = ("headers", "body", "answer")


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# The status of a request whose client left before there was one; it is counted and logged, and nobody reads it.
CLIENT_CLOSED_REQUEST = 499


class Traffic:
    """num_requests: those that have ended, by (method, route, status), each once. routes: as the server spells them;
    what has none counts for the route "". slow: clients given up.
    """

    def __init__(self) -> None:
        self.routes: frozenset[str] = frozenset()
        self.num_requests: Counter[tuple[str, str, int]] = Counter()
        self.slow: Counter[Phase] = Counter()
        self.num_connections = 0
        self.num_refused_connections = 0

    def count(self, method: str, route: str, status: int) -> None:
        """One request has ended."""
        self.num_requests[method if method in METHODS else "", route if route in self.routes else "", status] += 1
