"""A completions server of scripted behaviour, as bytes on a socket: what a client must cope with, in a few lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

METRICS = """# HELP ropeway:num_preemptions_total Preemptions
# TYPE ropeway:num_preemptions_total counter
ropeway:num_preemptions_total{{model_name="fake"}} {preemptions}
ropeway:recomputed_tokens_total{{model_name="fake"}} {recomputed}
"""


@dataclass
class FakeOpenAIServer:
    """Answers each completion with `max_tokens` words, `tokens_per_chunk` to a chunk, in pieces of `piece_bytes`."""

    tokens_per_chunk: int = 1
    piece_bytes: int = 1 << 16
    usage_offset: int = 0
    closes_after_answer: bool = False
    has_done: bool = True
    metrics_status: int = 200
    refusal: tuple[int, dict[str, Any]] | None = None
    error_event: dict[str, Any] | None = None
    cut_after_bytes: int | None = None
    delay_s: float = 0.0
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    request_heads: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_running: int = 0
    max_running: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
                if self.closes_after_answer:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away
        finally:
            writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request_heads.append(head)
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            self._get(path, writer)
            return
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await asyncio.sleep(self.delay_s)
            if self.refusal is not None:
                self._send(writer, self.refusal[0], json.dumps(self.refusal[1]).encode())
                return
            await self._stream(body, writer)
        finally:
            self.num_running -= 1

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            self._send(writer, 200, b'{"object":"list","data":[{"id":"fake-model"}]}')
        elif path == "/metrics" and self.metrics_status == 200:
            done = len(self.bodies)
            self._send(writer, 200, METRICS.format(preemptions=done, recomputed=10 * done).encode())
        else:
            status = self.metrics_status if path == "/metrics" else 404
            self._send(writer, status, b'{"error":{"message":"not for you"}}')

    @staticmethod
    def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def _events(self, body: dict[str, Any]) -> list[str]:
        count = body["max_tokens"]
        events = []
        for start in range(0, count, self.tokens_per_chunk):
            text = " a" * min(self.tokens_per_chunk, count - start)
            events.append(json.dumps({"choices": [{"text": text, "index": 0, "finish_reason": None}]}))
        events.append(json.dumps({"choices": [{"text": "", "index": 0, "finish_reason": "length"}]}))
        if self.error_event is not None:
            events[-1] = json.dumps({"error": self.error_event})
        prompt_tokens = len(body["prompt"]) if isinstance(body["prompt"], list) else len(body["prompt"].split())
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count + self.usage_offset}
        events.append(json.dumps({"choices": [], "usage": usage}))
        return events + (["[DONE]"] if self.has_done else [])

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        wire = b"".join(
            b"%x\r\n%b\r\n" % (len(event), event)
            for event in (f"data: {text}\r\n\r\n".encode() for text in self._events(body))
        )
        wire += b"0\r\n\r\n"
        if self.cut_after_bytes is not None:
            writer.write(wire[: self.cut_after_bytes])
            await writer.drain()
            writer.close()
            return
        for start in range(0, len(wire), self.piece_bytes):
            writer.write(wire[start : start + self.piece_bytes])
            await writer.drain()
            if self.piece_bytes < 1 << 16:
                await asyncio.sleep(0)

    @contextmanager
    def running(self) -> Iterator[FakeOpenAIServer]:
        """Serves from a thread with an event loop of its own."""
        is_ready, stop = Event(), asyncio.Event()
        loop = asyncio.new_event_loop()

        async def main() -> None:
            server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            is_ready.set()
            await stop.wait()
            server.close()
            # Whoever still holds a connection is cut off, as by a server that goes away.
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        def run() -> None:
            loop.run_until_complete(main())
            loop.close()

        thread = Thread(target=run)
        thread.start()
        is_ready.wait()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
