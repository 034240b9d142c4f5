"""What a client counted, held against what a server's metrics say: every request once, by class. Sends nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

_LINE = re.compile(r'^ropeway:(\w+)(?:\{((?:[^"}]|"[^"]*")*)\})? (\S+)$', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def read_samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Name without prefix -> (labels, value) of each sample of a Prometheus text."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in _LINE.findall(text):
        samples.setdefault(name, []).append((dict(_LABEL.findall(labels)), float(value)))
    return samples


def total(samples: Mapping[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(value for _, value in samples.get(name, []))


class Ledger:
    """seen: requests answered, by (method, route, status). unseen: those whose client left before a status came, by
    (method, route). ended: sequences by how they ended. num_refused: requests that the engine did not take. slow:
    clients that the server must have given up, by phase.
    """

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str, int]] = Counter()
        self.unseen: Counter[tuple[str, str]] = Counter()
        self.ended: Counter[str] = Counter()
        self.num_refused = 0
        self.slow: Counter[str] = Counter()
        self.num_perhaps_slow = 0  # left within their bodies: a server that is late itself may take them for slow
        self.faults: list[str] = []  # answers that are wrong in themselves

    def begin(self, text: str) -> None:
        """What the server has served before this client."""
        for labels, value in read_samples(text).get("http_requests_total", []):
            self.seen[labels["method"], labels["path"], int(labels["status"])] += int(value)

    @property
    def num_requests(self) -> int:
        return sum(self.seen.values()) + sum(self.unseen.values())

    def note_ends(self, name: str, status: Mapping[str, Any], num_sequences: int) -> None:
        """What `GET /v1/requests/{id}` tells of a request that has ended."""
        reasons, error = status["finish_reasons"], status["error"]
        if error is not None and "the queue is full" in error:
            self.num_refused += 1
            return
        if len(reasons) != num_sequences or (error is None and None in reasons):
            self.faults.append(f"{name}: {num_sequences} sequences were asked for, and {reasons} ended ({error})")
        self.ended.update("error" if reason is None else reason for reason in reasons)

    def differences(self, text: str) -> list[str]:
        """Where the server's metrics say other than this client counted; empty where every request was counted once."""
        samples = read_samples(text)
        found = list(self.faults)
        served: Counter[tuple[str, str, int]] = Counter()
        for labels, value in samples.get("http_requests_total", []):
            served[labels["method"], labels["path"], int(labels["status"])] += int(value)
        for method, route in sorted({key[:2] for key in served | self.seen} | set(self.unseen)):
            found += self._differences_of(method, route, served)
        ended = Counter(
            {labels["finished_reason"]: int(value) for labels, value in samples.get("request_success_total", [])}
        )
        for reason in sorted(ended | self.ended):
            if ended[reason] != self.ended[reason]:
                found.append(
                    f"sequences that ended with {reason}: {ended[reason]} served, {self.ended[reason]} counted"
                )
        refused = int(total(samples, "requests_refused_total"))
        if refused != self.num_refused:
            found.append(f"refused requests: {refused} served, {self.num_refused} counted")
        for labels, value in samples.get("slow_clients_total", []):
            phase, least = labels["phase"], self.slow[labels["phase"]]
            most = {"headers": least, "body": least + self.num_perhaps_slow}.get(phase, value)
            if not least <= value <= most:
                found.append(f"clients slow at {phase}: {value:g} served, {least} counted")
        return found

    def _differences_of(self, method: str, route: str, served: Counter[tuple[str, str, int]]) -> list[str]:
        """By status: at least what was seen; all together: what was sent."""
        found = []
        statuses = {key[2] for key in served | self.seen if key[:2] == (method, route)}
        num_beyond = 0
        for status in sorted(statuses):
            beyond = served[method, route, status] - self.seen[method, route, status]
            num_beyond += beyond
            if beyond < 0:
                found.append(
                    f"{method} {route} {status}: {served[method, route, status]} served, "
                    f"{self.seen[method, route, status]} seen"
                )
        if num_beyond != self.unseen[method, route]:
            found.append(
                f"{method} {route}: {num_beyond} served beyond those whose answer was seen, "
                f"{self.unseen[method, route]} sent"
            )
        return found

    def table(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "num_requests": self.num_requests,
            "seen": {" ".join(map(str, key)): count for key, count in sorted(self.seen.items())},
            "unseen": {" ".join(key): count for key, count in sorted(self.unseen.items())},
            "sequences_ended": dict(sorted(self.ended.items())),
            "num_refused": self.num_refused,
            "slow_clients": dict(self.slow),
        }
