"""Calls an ASGI application in this process, without sockets: the application's own code and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropeway.llm import AsyncLLM
from ropeway.server.app import create_app
from ropeway.server.config import ServerConfig
from ropeway.server.tenants import KeyRing
from ropeway.server.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the whole body, whether it was streamed or not."""

    status: int
    headers: dict[str, str]
    body: bytes


class AsgiClient:
    """Sends requests to an application."""

    def __init__(self, app: Any, llm: AsyncLLM) -> None:
        self._app = app
        self.llm = llm

    async def post(self, path: str, body: bytes, content_type: str = "application/json") -> Answer:
        """The answer to a body. Raises what the application lets through: a server would answer 500."""
        return await self._ask("POST", path, body, content_type)

    async def leave(self, path: str, body: bytes, num_chunks: int) -> Answer:
        """Posts, and leaves once so many chunks of the answer have come: what it got."""
        return await self._ask("POST", path, body, "application/json", num_chunks)

    async def get(self, path: str) -> Answer:
        return await self._ask("GET", path, b"", "application/json")

    async def _ask(
        self, method: str, path: str, body: bytes, content_type: str, num_chunks: int | None = None
    ) -> Answer:
        """num_chunks: of the answer, after which the client leaves; None: it stays."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"test"),
                (b"content-type", content_type.encode()),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        is_read, leaves = False, asyncio.Event()
        start: dict[str, Any] = {}
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if is_read:
                await leaves.wait()
                return {"type": "http.disconnect"}
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif not leaves.is_set():
                parts.append(message.get("body", b""))
            if len(parts) == num_chunks:
                leaves.set()

        await self._app(scope, receive, send)
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, b"".join(parts))


@asynccontextmanager
async def running_app(model: Path, config: ServerConfig | None = None, **options: object) -> AsyncIterator[AsgiClient]:
    """The application on a model, its engine running, without keys. options: the fields of `EngineConfig`."""
    llm = AsyncLLM(model, **options)
    app = create_app(llm, config or ServerConfig(), KeyRing({}, None), Traffic())
    async with app.router.lifespan_context(app):
        yield AsgiClient(app, llm)
