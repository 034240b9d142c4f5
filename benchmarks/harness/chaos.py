"""Random load on a server with keys: everything that clients do, right or wrong, and what an operator does meanwhile.

Every request goes through the ledger. After each that may have reached the engine, `GET /v1/requests/{id}` tells what
became of its sequences, so that the ledger knows it also where the client did not wait.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from harness.ledger import Ledger
from harness.raw_http import Exchange, fetch, request_bytes

ADMIN_KEY = "admin-key"
MAX_MODEL_LEN = 512
MAX_BODY_BYTES = 256 << 10
POLL_S = 0.05
SETTLE_TIMEOUT_S = 240.0
BLIND_ROUND_TRIPS = 4
ENDED = ("finished", "aborted", "failed")
STATUS_ROUTE = "/v1/requests/{request_id}"
RESPONSE_ROUTE = "/v1/responses/{response_id}"

WORDS = ("ropeway", "cabin", "line", "tower", "haul", "αβγ", "🚡", "valley", "wind", "\n", "ride", "snow")
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-c]{3,9}"},
    {"choice": ["left", "right"]},
    {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that generates. route: what it is sent to; num_sequences: that may come of it."""

    route: str
    fields: dict[str, Any]
    is_streamed: bool
    num_sequences: int = 1


class Asks:
    """Makes bodies of every kind that generates."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def draw(self, *, max_tokens: int | None = None, is_streamed: bool | None = None) -> Ask:
        rng = self._rng
        tokens = max_tokens or rng.choice((1, 4, 8, 16, 32, 64))
        streamed = rng.random() < 0.5 if is_streamed is None else is_streamed
        kind = rng.choice((self._completion, self._completion, self._chat, self._chat, self._messages, self._responses))
        return kind(tokens, streamed)

    def text(self, num_words: int | None = None) -> str:
        return " ".join(self._rng.choices(WORDS, k=num_words or self._rng.randint(1, 25)))

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        fields: dict[str, Any] = {"temperature": rng.choice((0, 1)), "stream": False}
        for share, more in (
            (0.3, {"ignore_eos": True}),
            (0.1, {"stop": ["e", "a b"]}),
            (0.1, {"seed": rng.randrange(2**31)}),
            (0.1, {"repetition_penalty": 1.3, "top_k": 20, "top_p": 0.9}),
            (0.1, {"structured_outputs": rng.choice(GRAMMARS)}),
            (0.05, {"timeout": rng.choice((0.01, 0.1, 30))}),
            (0.05, {"logit_bias": {"65": 20}}),
            (0.05, {"user": rng.choice("abc"), "cache_salt": "salt"}),
        ):
            if rng.random() < share:
                fields |= more
        return fields

    def _completion(self, max_tokens: int, is_streamed: bool) -> Ask:
        rng = self._rng
        n = rng.choice((1, 1, 1, 2, 4))
        fields = self._sampling() | {"prompt": self.text(), "max_tokens": max_tokens, "n": n, "stream": is_streamed}
        if rng.random() < 0.15:
            fields |= {"logprobs": rng.randint(0, 5), "echo": rng.random() < 0.5}
        elif rng.random() < 0.1:
            fields |= {"prompt_logprobs": 3}
        return Ask("/v1/completions", fields, is_streamed, n)

    def _chat(self, max_tokens: int, is_streamed: bool) -> Ask:
        rng = self._rng
        n = rng.choice((1, 1, 1, 3))
        fields = self._sampling() | {"max_tokens": max_tokens, "n": n, "stream": is_streamed}
        fields["messages"] = [{"role": "system", "content": "Answer."}, {"role": "user", "content": self.text()}]
        if rng.random() < 0.15:
            fields |= {"logprobs": True, "top_logprobs": rng.randint(0, 20)}
        elif is_streamed and rng.random() < 0.3:
            fields["stream_options"] = {"include_usage": True}
        return Ask("/v1/chat/completions", fields, is_streamed, n)

    def _messages(self, max_tokens: int, is_streamed: bool) -> Ask:
        messages = [{"role": "user", "content": self.text()}]
        fields = {"model": "tiny", "max_tokens": max_tokens, "messages": messages, "stream": is_streamed}
        return Ask("/v1/messages", fields, is_streamed)

    def _responses(self, max_tokens: int, is_streamed: bool) -> Ask:
        fields = {"input": self.text(), "max_output_tokens": max_tokens, "stream": is_streamed}
        return Ask("/v1/responses", fields | {"store": self._rng.random() < 0.7}, is_streamed)


class Keys:
    """The key file: three tenants, one of them with a low rate; one key is replaced at each rewriting."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = itertools.count()
        self.rewrite()

    def rewrite(self) -> None:
        """Other keys for one tenant; the file changes in one step."""
        shop = f"key-shop-{next(self._numbers)}"
        self.keys = ("key-lab", shop, "key-slow")
        content = {
            "key-lab": {"tenant": "lab", "weight": 2},
            shop: {"tenant": "shop"},
            "key-slow": {"tenant": "slow", "requests_per_min": 120, "tokens_per_min": 2000},
        }
        partial = self._path.with_suffix(".part")
        partial.write_bytes(orjson.dumps(content))
        partial.replace(self._path)

    def spoil(self) -> None:
        """A file with an error, which a server must not take."""
        self._path.write_text('{"key": ')


class Chaos:
    """Actions against the server on `port`. `act` does one of a client's at random."""

    def __init__(self, port: int, keys: Keys, rng: random.Random) -> None:
        self.ledger = Ledger()
        self._port = port
        self._keys = keys
        self._rng = rng
        self.asks = Asks(rng)
        self._numbers = itertools.count()
        self._num_blind = 0  # a client that leaves blindly does not learn whether it was refused,
        self._is_crowded = False  # so it does not do so while the queue may be full
        self._actions: tuple[tuple[int, Callable[[], Awaitable[None]]], ...] = (
            (40, self.ask),
            (10, self.leave_stream),
            (6, self.leave_while_it_computes),
            (3, self.leave_blindly),
            (2, self.stop_reading),
            (6, self.abort_one),
            (4, self.background_response),
            (6, self.be_refused),
            (1, self.dribble_body),
            (1, self.dribble_headers),
            (2, self.leave_within_body),
            (6, self.look),
            (4, self.tokenize),
        )

    async def act(self) -> None:
        weights = [weight for weight, _ in self._actions]
        await self._rng.choices([action for _, action in self._actions], weights)[0]()

    # --- requests that generate
    async def ask(self, ask: Ask | None = None) -> None:
        """Asks and reads the answer to its end."""
        ask = ask or self.asks.draw()
        name = self._name()
        status, body = await self._fetch("POST", ask.route, ask.fields, name)
        if status == 200 and ask.is_streamed and not _is_whole_stream(ask.route, body):
            self.ledger.faults.append(f"{name}: the stream of {ask.route} has no end: …{body[-200:]!r}")
        await self._settle(name, ask, status, body)

    async def leave_stream(self) -> None:
        """Leaves after some events of a stream."""
        ask, name = self.asks.draw(max_tokens=64, is_streamed=True), self._name()
        num_events = self._rng.randint(1, 12)
        async with Exchange(self._port) as exchange:
            exchange.send(self._bytes("POST", ask.route, ask.fields, name))
            status = await exchange.head()
            self.ledger.seen["POST", ask.route, status] += 1
            body = b""
            async for chunk in exchange.chunks():
                body = body + chunk if status != 200 else b""
                num_events -= 1
                if not num_events and status == 200:
                    break
        await self._settle(name, ask, status, body)

    async def leave_while_it_computes(self) -> None:
        """Leaves an answer that is not streamed, once the server knows of it."""
        ask, name = self.asks.draw(max_tokens=64, is_streamed=False), self._name()
        async with Exchange(self._port) as exchange:
            exchange.send(self._bytes("POST", ask.route, ask.fields, name))
            answered = asyncio.create_task(exchange.head())
            while not answered.done() and await self._status(name) is None:
                await asyncio.wait([answered], timeout=POLL_S)
            if answered.done():
                self.ledger.seen["POST", ask.route, answered.result()] += 1
                await self._settle(name, ask, answered.result(), await exchange.body())
                return
            answered.cancel()
        self.ledger.unseen["POST", ask.route] += 1
        await self._settle(name, ask, None, b"")

    async def leave_blindly(self) -> None:
        """Leaves at once, whether or not anybody has read the request."""
        if self._is_crowded:
            return
        self._num_blind += 1
        try:
            fields = {"prompt": self.asks.text(), "max_tokens": self._rng.choice((1, 8, 64))}
            ask, name = Ask("/v1/completions", fields, False), self._name()
            async with Exchange(self._port) as exchange:
                exchange.send(self._bytes("POST", ask.route, ask.fields, name))
                await asyncio.sleep(self._rng.choice((0, 0.001, 0.02)))
            self.ledger.unseen["POST", ask.route] += 1
            for _ in range(BLIND_ROUND_TRIPS):  # what was sent is read meanwhile, if it ever is
                await self.look()
            await self._settle(name, ask, None, b"")
        finally:
            self._num_blind -= 1

    async def stop_reading(self) -> None:
        """Reads nothing of a long stream, until the server has ended it."""
        fields = {
            "prompt": "go on",
            "max_tokens": 400,
            "ignore_eos": True,
            "n": 4,
            "stream": True,
            "logprobs": 5,
        }
        ask, name = Ask("/v1/completions", fields, True, 4), self._name()
        async with Exchange(self._port, window_bytes=2048) as exchange:
            exchange.send(self._bytes("POST", ask.route, ask.fields, name))
            status = await exchange.head()
            self.ledger.seen["POST", ask.route, status] += 1
            body = b"" if status == 200 else await exchange.body()
            await self._settle(name, ask, status, body)

    async def abort_one(self) -> None:
        """Has an operator abort a request by the client's own name for it."""
        ask, name = self.asks.draw(max_tokens=64), self._name()
        asking = asyncio.create_task(self._fetch("POST", ask.route, ask.fields, name))
        await asyncio.sleep(self._rng.choice((0.0, 0.01, 0.1)))
        await self._operate("POST", "/abort_requests", {"request_ids": [name]})
        status, body = await asking
        await self._settle(name, ask, status, body)

    async def background_response(self) -> None:
        """A response in the background: retrieved, and then cancelled, deleted, or gone on from."""
        name, key = self._name(), self._keys.keys[0]
        fields = {"input": self.asks.text(), "max_output_tokens": self._rng.choice((4, 32)), "background": True}
        ask = Ask("/v1/responses", fields, False)
        status, body = await self._fetch("POST", ask.route, fields, name, key)
        if status == 200:
            path = f"/v1/responses/{orjson.loads(body)['id']}"
            await self._fetch("GET", RESPONSE_ROUTE, None, self._name(), key, path)
            end = self._rng.choice(("cancel", "delete", "go on"))
            if end == "cancel":
                await self._fetch("POST", f"{RESPONSE_ROUTE}/cancel", {}, self._name(), key, f"{path}/cancel")
            elif end == "delete":
                await self._fetch("DELETE", RESPONSE_ROUTE, None, self._name(), key, path)
        await self._settle(name, ask, status, body)
        if status == 200 and end == "go on":
            more = {"input": "And then?", "max_output_tokens": 4, "previous_response_id": path.rpartition("/")[2]}
            later, name = Ask("/v1/responses", more, False), self._name()
            await self._settle(name, later, *await self._fetch("POST", later.route, more, name, key))

    # --- requests that do not
    async def be_refused(self) -> None:
        """A request with a fault, which is answered as such."""
        rng, text = self._rng, self.asks.text()
        body = {"prompt": text, "max_tokens": 4}
        completions = "/v1/completions"
        cases: tuple[tuple[int, str, str, object, str | None], ...] = (
            (400, "POST", completions, body | {"prompt": "long " * 400}, None),
            (400, "POST", completions, body | {"max_tokens": 10**6}, None),
            (400, "POST", completions, body | {"temprature": 1}, None),
            (400, "POST", completions, body | {"n": "two"}, None),
            (400, "POST", completions, body | {"best_of": 4}, None),
            (400, "POST", completions, b'{"prompt": "half', None),
            (400, "POST", completions, b"\xff\xfe", None),
            (400, "POST", completions, body | {"structured_outputs": {"regex": "("}}, None),
            (400, "POST", "/v1/messages", {"messages": []}, None),
            (404, "POST", completions, body | {"model": "gpt-5"}, None),
            (404, "GET", "/v1/nothing", None, None),
            (405, "GET", completions, None, None),
            (413, "POST", completions, b" " * (MAX_BODY_BYTES + 1), None),
            (401, "POST", completions, body, "wrong"),
            (403, "GET", "/metrics", None, self._keys.keys[0]),
        )
        wanted, method, path, content, key = rng.choice(cases)
        route = "" if path == "/v1/nothing" else path
        fields, raw = (None, content) if isinstance(content, bytes) else (content, None)
        request = self._bytes(method, path, fields, self._name(), key or self._keys.keys[0], raw)
        status, answer = await fetch(self._port, request)
        self.ledger.seen[method, route, status] += 1
        if status == 503 and b"the queue is full" in answer:
            self.ledger.num_refused += 1  # that comes before what is wrong with it
        elif status != wanted:
            self.ledger.faults.append(
                f"{method} {path} with {content!r:.60} gave {status}, not {wanted}: {answer[:200]!r}"
            )

    async def dribble_body(self) -> None:
        """Sends a body drop by drop until the server has enough of it."""
        head = self._bytes("POST", "/v1/completions", {"prompt": "x" * 100_000}, self._name(), self._keys.keys[0])
        async with Exchange(self._port) as exchange:
            exchange.send(head[:400])
            answered = asyncio.create_task(exchange.head())
            while not answered.done():
                exchange.send(b"x")
                await asyncio.wait([answered], timeout=0.2)
            self.ledger.seen["POST", "/v1/completions", answered.result()] += 1
        self.ledger.slow["body"] += 1

    async def dribble_headers(self) -> None:
        """Never gets beyond its headers; what it is answered is for no request."""
        async with Exchange(self._port) as exchange:
            exchange.send(b"GET /health HTTP/1.1\r\n")
            answered = asyncio.create_task(exchange.head())
            while not answered.done():
                exchange.send(b"x-a: b\r\n")
                await asyncio.wait([answered], timeout=0.2)
            if answered.result() != 408:
                self.ledger.faults.append(f"headers without an end were answered {answered.result()}")
        self.ledger.slow["headers"] += 1

    async def leave_within_body(self) -> None:
        """Leaves after half of a body."""
        data = self._bytes("POST", "/v1/chat/completions", {"messages": "x" * 1000}, self._name(), self._keys.keys[0])
        async with Exchange(self._port) as exchange:
            exchange.send(data[: len(data) - 500])
            await asyncio.sleep(0.05)
        self.ledger.unseen["POST", "/v1/chat/completions"] += 1
        self.ledger.num_perhaps_slow += 1

    async def look(self) -> None:
        """Asks what everybody may ask."""
        path = self._rng.choice(("/health", "/ping", "/version", "/v1/models", "/openapi.json", "/docs"))
        await self._fetch("GET", path, None, self._name())

    async def tokenize(self) -> None:
        """Tokens of a text, the text of tokens, or how many a conversation has."""
        text = self.asks.text()
        message = [{"role": "user", "content": text}]
        path, fields = self._rng.choice(
            (
                ("/tokenize", {"prompt": text}),
                ("/detokenize", {"tokens": [65, 66, 67]}),
                ("/v1/messages/count_tokens", {"model": "tiny", "messages": message}),
            )
        )
        await self._fetch("POST", path, fields, self._name())

    # --- the operator
    async def burst(self, num_requests: int) -> None:
        """Many at once: more than the queue holds."""
        self._is_crowded = True
        while self._num_blind:
            await asyncio.sleep(POLL_S)
        asks = [self.asks.draw(max_tokens=16) for _ in range(num_requests)]
        await asyncio.gather(*[self.ask(each) for each in asks])
        self._is_crowded = False

    async def pause(self, duration_s: float) -> None:
        """Nothing is computed for a while."""
        await self._operate("POST", "/pause", {})
        ready, _ = await self._fetch("GET", "/ready", None, self._name())
        if ready != 503:
            self.ledger.faults.append(f"/ready was {ready} while paused")
        await asyncio.sleep(duration_s)
        await self._operate("POST", "/resume", {})

    async def metrics(self) -> str:
        """The text of /metrics. Its own request is counted by the next one."""
        text = await fetch(self._port, self._bytes("GET", "/metrics", None, self._name(), ADMIN_KEY))
        self.ledger.seen["GET", "/metrics", text[0]] += 1
        return text[1].decode()

    # --- what they share
    async def _settle(self, name: str, ask: Ask, status: int | None, body: bytes) -> None:
        """Notes in the ledger what became of a request; status: None where its client left before one."""
        if status == 503 and b"the queue is full" in body:
            self.ledger.num_refused += 1
            return
        if status is not None and status not in (200, 499, 503, 504):
            if status not in (401, 429):  # the key was replaced just now, or its rate is used up
                self.ledger.faults.append(f"{name}: {ask.route} with {ask.fields} gave {status}: {body[:300]!r}")
            return
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SETTLE_TIMEOUT_S
        while (found := await self._status(name)) is not None and found["state"] not in ENDED:
            if loop.time() > end_s:
                self.ledger.faults.append(f"{name}: it has not ended after {SETTLE_TIMEOUT_S:g} s: {found}")
                return
            await asyncio.sleep(POLL_S)
        if found is not None:
            self.ledger.note_ends(name, found, ask.num_sequences)
        elif status is not None:
            self.ledger.faults.append(f"{name}: answered {status}, and nobody knows of it")

    async def _status(self, name: str) -> dict[str, Any] | None:
        """What the server tells of a request; None where it knows none of that name."""
        request = self._bytes("GET", f"/v1/requests/{name}", None, self._name(), ADMIN_KEY)
        status, body = await fetch(self._port, request)
        self.ledger.seen["GET", STATUS_ROUTE, status] += 1
        found: dict[str, Any] | None = orjson.loads(body) if status == 200 else None
        return found

    async def _operate(self, method: str, path: str, fields: object) -> None:
        await self._fetch(method, path, fields, self._name(), ADMIN_KEY)

    async def _fetch(
        self, method: str, route: str, fields: object, name: str, key: str | None = None, path: str | None = None
    ) -> tuple[int, bytes]:
        """Sends, reads the whole answer, and notes its status. path: where it is not the route itself."""
        status, body = await fetch(self._port, self._bytes(method, path or route, fields, name, key))
        self.ledger.seen[method, route, status] += 1
        if status >= 500 and status not in (503, 504):
            self.ledger.faults.append(f"{method} {route} gave {status}: {fields!r:.200}")
        return status, body

    def _bytes(
        self, method: str, path: str, fields: object, name: str, key: str | None = None, body: bytes | None = None
    ) -> bytes:
        key = key or self._rng.choices(self._keys.keys, (10, 5, 1))[0]
        headers = {"Authorization": f"Bearer {key}", "x-request-id": name}
        return request_bytes(method, path, fields, headers, body)

    def _name(self) -> str:
        return f"soak-{next(self._numbers)}"


def _is_whole_stream(route: str, body: bytes) -> bool:
    """Whether a stream ends as it should: with its last event, or with an error."""
    last = {"/v1/messages": b"event: message_stop", "/v1/responses": b"event: response."}.get(route, b"data: [DONE]")
    return last in body[-6000:] or b'"error"' in body
