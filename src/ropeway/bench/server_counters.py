"""Scheduling counters that a server exposes at /metrics, read around a run. Knows the Prometheus text format."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ropeway.bench.client import Client, ClientError

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)")
_PREEMPTIONS = re.compile(r"(^|:)num_preemptions(_total)?$")
_RECOMPUTED = re.compile(r"(^|:)(num_)?recomputed_tokens(_total)?$")


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Totals since the server started, or their growth over a run; None where the server does not say."""

    num_preemptions: int | None
    num_recomputed_tokens: int | None

    def since(self, earlier: ServerCounters) -> ServerCounters:
        return ServerCounters(
            _difference(self.num_preemptions, earlier.num_preemptions),
            _difference(self.num_recomputed_tokens, earlier.num_recomputed_tokens),
        )


def parse_server_counters(text: str) -> ServerCounters:
    """Sums each counter over its labels, under whatever prefix (vllm:, ropeway:) the server uses."""
    preemptions: float | None = None
    recomputed: float | None = None
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, value = sample.groups()
        if _PREEMPTIONS.search(name):
            preemptions = (preemptions or 0) + float(value)
        elif _RECOMPUTED.search(name):
            recomputed = (recomputed or 0) + float(value)
    return ServerCounters(_whole(preemptions), _whole(recomputed))


async def read_server_counters(client: Client) -> ServerCounters | None:
    """The counters now, or None when the server has no /metrics, or keeps it from us."""
    try:
        text = (await client.get("/metrics", is_admin=True)).decode(errors="replace")
    except ClientError:
        return None
    return parse_server_counters(text)


async def counters_problem(client: Client) -> str | None:
    """Why the counters will be missing, where a key is to blame."""
    try:
        await client.get("/metrics", is_admin=True)
    except ClientError as error:
        if error.status in (401, 403):
            return f"no counters of the server: /metrics answers {error}; give its key with --admin-api-key"
    return None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
