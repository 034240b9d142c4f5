"""Scripted arrivals sent to a server over HTTP, with the face of a `Simulation`: an experiment cannot tell them apart.

An answer ends where it was scripted to by a sampled stop token: its bias is overwhelming, and until then it is
forbidden (`min_tokens`), so the scheduler knows no more of the length than of anybody's. A tenant is an API key.
Knows no experiment, scheduler or log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson
import uvloop

from ropeway.bench.client import Client, ClientError, Endpoint, StreamReader
from ropeway.sim.simulator import STOP_TOKEN_ID, Arrival, FollowUp, Passage

FULL_BIAS = 100


class ServedLoad:
    """Clients of one server. Times are seconds since this was made; those of tokens are when their chunk arrived.

    keys: of the tenants. Tokens of open answers are counted by chunks, those of whole ones as the server states them.
    """

    def __init__(self, url: str, keys: Mapping[str, str]) -> None:
        self.start_s = time.monotonic()
        self.passages: list[Passage] = []
        self._endpoint = Endpoint.parse(url)
        self._keys = keys
        self._clients: dict[str, Client] = {}
        self._open: dict[str, tuple[Passage, asyncio.Task[None]]] = {}
        self._follow_up: FollowUp | None = None
        self._on_step: Callable[[Any], None] | None = None

    def clock(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self.start_s

    @property
    def num_output_tokens(self) -> int:
        """That clients have received."""
        return sum(passage.num_output_tokens for passage in self.passages)

    @property
    def open_ids(self) -> list[str]:
        """The requests that are not over, oldest first."""
        return [passage.arrival.request.request_id for passage, _ in self._open.values()]

    def run(
        self,
        arrivals: Iterable[Arrival],
        *,
        follow_up: FollowUp | None = None,
        until_s: float | None = None,
        on_step: Callable[[Any], None] | None = None,
    ) -> None:
        """As `Simulation.run`; on_step: called whenever something arrives.

        Raises ClientError where a request fails otherwise than by a refusal for overload.
        """
        self._follow_up, self._on_step = follow_up, on_step
        uvloop.run(self._run(list(arrivals), until_s))

    def abort(self, request_id: str) -> None:
        """The client of an open request leaves: it closes the connection."""
        passage, task = self._open.pop(request_id)
        passage.finish_reason, passage.end_s = "abort", self.clock()
        task.cancel()

    async def _run(self, arrivals: list[Arrival], until_s: float | None) -> None:
        try:
            async with asyncio.timeout(None if until_s is None else until_s - self.clock()):
                async with asyncio.TaskGroup() as group:
                    for arrival in arrivals:
                        group.create_task(self._pass(arrival, group))
        except TimeoutError:
            pass  # the time is over, not an error
        finally:
            for client in self._clients.values():
                await client.close()

    async def _pass(self, arrival: Arrival, group: asyncio.TaskGroup) -> None:
        """One request, from its arrival to its end, and what the same client sends then."""
        request = arrival.request
        client = self._client(request.terms.tenant)
        encoded = client.encode("POST", "/v1/completions", orjson.dumps(_body(arrival)))
        await asyncio.sleep(arrival.arrival_s - self.clock())
        passage = Passage(arrival, num_open=request.params.n)
        self.passages.append(passage)
        task = asyncio.current_task()
        assert task is not None
        self._open[request.request_id] = (passage, task)
        reader = _Reader(self.clock, passage)
        reader.on_feed = self._tell
        try:
            await client.stream(encoded, reader)
            self._finish(passage, reader)
        except ClientError as error:
            if not str(error).startswith("HTTP 503"):
                raise
            passage.is_refused = True
        passage.end_s = self.clock() if reader.end_s is None else reader.end_s
        del self._open[request.request_id]
        following = self._follow_up(passage) if self._follow_up is not None else None
        if following is not None:
            group.create_task(self._pass(following, group))

    def _finish(self, passage: Passage, reader: StreamReader) -> None:
        arrival = passage.arrival
        each = min(arrival.num_output_tokens, arrival.request.max_tokens)
        due = each * arrival.request.params.n
        if reader.num_output_tokens != due:
            raise ClientError(f"an answer of {due} tokens was scripted, and {reader.num_output_tokens} came")
        passage.num_output_tokens = due
        if passage.first_token_s is None:
            passage.first_token_s = reader.end_s  # it showed no text
        passage.finish_reason = "stop" if arrival.num_output_tokens <= arrival.request.max_tokens else "length"

    def _tell(self) -> None:
        if self._on_step is not None:
            self._on_step(self)

    def _client(self, tenant: str) -> Client:
        if tenant not in self._clients:
            self._clients[tenant] = Client(self._endpoint, api_key=self._keys.get(tenant))
        return self._clients[tenant]


class _Reader(StreamReader):
    """Keeps a passage up to date while its answer comes."""

    on_feed: Callable[[], None]

    def __init__(self, clock: Callable[[], float], passage: Passage) -> None:
        super().__init__(clock)
        self._passage = passage

    def feed(self, data: bytes) -> None:
        super().feed(data)
        times_s, passage = self.chunk_times_s, self._passage
        if times_s and passage.first_token_s is None:
            passage.first_token_s = times_s[0]
        passage.token_times_s = times_s
        passage.num_output_tokens = len(times_s)
        self.on_feed()


def _body(arrival: Arrival) -> dict[str, Any]:
    request = arrival.request
    body: dict[str, Any] = {
        "prompt": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "n": request.params.n,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "stop_token_ids": [STOP_TOKEN_ID],
        "logit_bias": {str(STOP_TOKEN_ID): FULL_BIAS},
        "min_tokens": min(arrival.num_output_tokens - 1, request.max_tokens),
    }
    if request.terms.user is not None:
        body["user"] = request.terms.user
    return body
