"""A client leaves its stream, before the first byte or amid it, by every endpoint: its work ends and is accounted for
once, and nothing of it stays but a stored response, whose size counts without anybody asking. In this process.
"""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ropeway.engine.output_stream import OutputStream
from ropeway.llm import AsyncLLM
from ropeway.server import response_routes
from ropeway.server.app import create_app
from ropeway.server.choices import RequestChoices
from ropeway.server.config import ServerConfig
from ropeway.server.messages import MessageWriter
from ropeway.server.openai import ChunkWriter, Generation
from ropeway.server.response_store import ResponseStore
from ropeway.server.tenants import Caller, KeyRing
from ropeway.server.tracing import RequestTraces
from ropeway.server.traffic import Traffic
from support.asgi_client import AsgiClient

MESSAGES = [{"role": "user", "content": "Go on."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "go on", "max_tokens": 400},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 400, "logprobs": True},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 400},
    "/v1/responses": {"input": "Go on.", "max_output_tokens": 400},
}
READERS = (OutputStream, RequestChoices, Generation, ChunkWriter, MessageWriter)


def num_readers() -> int:
    gc.collect()
    return sum(issubclass(type(each), READERS) for each in gc.get_objects())  # isinstance would ask proxies


@pytest.mark.asyncio
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("num_chunks", [0, 4])
async def test_what_a_client_leaves_behind(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, num_chunks: int
) -> None:
    charged: list[int] = []
    store, exporter = ResponseStore(), InMemorySpanExporter()
    monkeypatch.setattr(Caller, "charge", lambda self, num_tokens: charged.append(num_tokens))
    monkeypatch.setattr(response_routes, "ResponseStore", lambda: store)
    num_before = num_readers()
    llm = AsyncLLM(tiny_model_path, backend="reference", num_kv_blocks=64, served_model_name="tiny")
    monkeypatch.setattr(llm.builder.tokenizer, "eos_token_ids", frozenset())  # no answer ends by itself meanwhile
    app = create_app(llm, ServerConfig(), KeyRing({}), Traffic(), RequestTraces(SimpleSpanProcessor(exporter)))
    async with app.router.lifespan_context(app):
        client = AsgiClient(app, llm)
        answer = await client.leave(path, json.dumps({**BODIES[path], "stream": True}).encode(), num_chunks)
        assert answer.status == 200 and (not answer.body if num_chunks == 0 else answer.body)
        assert store._num_bytes == size_of(store), "it is known as soon as the client has left"
        while llm.engine.num_open_requests or llm.engine.stats.num_used_blocks:
            await asyncio.sleep(0.005)
        assert num_readers() == num_before
        (span,) = exporter.get_finished_spans()
        told = dict(span.attributes or {})
        assert told["gen_ai.response.finish_reasons"] == ("abort",)
        found = json.loads((await client.get(f"/v1/requests/{told['gen_ai.response.id']}")).body)
        assert found["state"] == "aborted"
        assert sum(charged) == found["usage"]["total_tokens"] and len(charged) == 2, "the prompt, then the answer"
        assert len(store._stored) == (path == "/v1/responses")
        for response_id, stored in store._stored.items():
            response = json.loads((await client.get(f"/v1/responses/{response_id}")).body)
            assert response == stored.live.object() and response["status"] == "cancelled"
            assert all(item["status"] == "incomplete" for item in response["output"])
            assert response["output"] or not num_chunks
        assert store._num_bytes == size_of(store), "it counts once"


def size_of(store: ResponseStore) -> int:
    """What it holds, as JSON."""
    said = [[message.model_dump() for message in stored.conversation] for stored in store._stored.values()]
    shown = [stored.live.object() for stored in store._stored.values()]
    return sum(len(json.dumps(each, separators=(",", ":"), ensure_ascii=False).encode()) for each in (*said, *shown))
