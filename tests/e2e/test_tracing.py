"""Traces: one span per request to generate, with what it used and how long it took; refusals too; no texts."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests.e2e.conftest import ENGINE_FLAGS
from tests.support.running_server import RunningServer

from ropeway.errors import ConfigError
from ropeway.llm import AsyncLLM
from ropeway.server.app import create_app
from ropeway.server.config import ServerConfig
from ropeway.server.tenants import KeyRing, KeyTerms
from ropeway.server.tracing import RequestTraces, open_traces
from ropeway.server.traffic import Traffic

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET, TEXT = "s3cret-key", "pelican"
HEADERS = {"Authorization": f"Bearer {SECRET}"}


@asynccontextmanager
async def traced(model: Path, **options: object) -> AsyncIterator[tuple[httpx.AsyncClient, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    llm = AsyncLLM(model, backend="reference", num_kv_blocks=64, **options)
    keys = KeyRing({SECRET: KeyTerms(tenant="lab")}, "boss")
    app = create_app(llm, ServerConfig(), keys, Traffic(), RequestTraces(SimpleSpanProcessor(exporter)))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", headers=HEADERS) as http,
    ):
        yield http, exporter


def attributes(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


async def spans(exporter: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    """The spans, once there are so many: the last ends with the engine's work, perhaps after the answer."""
    for _ in range(500):
        if len(exporter.get_finished_spans()) >= count:
            break
        await asyncio.sleep(0.01)
    found = list(exporter.get_finished_spans())
    assert len(found) == count
    exporter.clear()
    return found


@pytest.mark.asyncio
async def test_spans_of_requests(tiny_model_path: Path) -> None:
    body: dict[str, Any] = {"prompt": TEXT, "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "seed": 7}
    async with traced(tiny_model_path) as (http, exporter):
        parent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
        answer = (await http.post("/v1/completions", json=body, headers=parent)).json()
        (span,) = await spans(exporter, 1)
        assert span.parent is not None and span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID and f"{span.parent.span_id:016x}" == PARENT_ID
        told = attributes(span)
        expected = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.response.id": answer["id"],
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 7,
            "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.response.finish_reasons": ("length",),
            "ropeway.request_id": "mine",
        }
        assert expected.items() <= told.items()
        times = [told[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")]
        assert 0 <= times[0] < times[1] <= times[2]
        assert span.resource.attributes["service.name"] == "ropeway"
        assert not [value for value in told.values() if TEXT in str(value) or SECRET in str(value)]

        chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "n": 2, "stream": True}
        assert "[DONE]" in (await http.post("/v1/chat/completions", json=chat)).text
        told = attributes((await spans(exporter, 1))[0])
        assert (told["gen_ai.operation.name"], told["gen_ai.request.choice.count"]) == ("chat", 2)
        assert len(told["gen_ai.response.finish_reasons"]) == 2

        unsampled = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}  # the caller wants no trace of this one
        assert (await http.post("/v1/completions", json=body, headers=unsampled)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200
        await spans(exporter, 0)


@pytest.mark.asyncio
async def test_spans_of_what_is_refused_or_ended(tiny_model_path: Path) -> None:
    async with traced(tiny_model_path) as (http, exporter):
        assert (await http.post("/v1/completions", json={"prompt": ""})).status_code == 400
        assert (await http.post("/v1/messages", headers={"Authorization": "Bearer x"})).status_code == 401
        told = [attributes(span) for span in await spans(exporter, 2)]
        assert [(each["http.response.status_code"], each["error.type"]) for each in told] == [
            (400, "400"),
            (401, "401"),
        ]

        slow = {"prompt": "go on", "max_tokens": 400, "ignore_eos": True, "timeout": 0.05}
        assert (await http.post("/v1/completions", json=slow)).status_code == 504
        (span,) = await spans(exporter, 1)
        assert attributes(span)["error.type"] == "RequestTimeoutError" and span.status.status_code is StatusCode.ERROR

        background = {"input": "go on", "max_output_tokens": 3, "background": True, "temperature": 0}
        response = (await http.post("/v1/responses", json=background)).json()
        (span,) = await spans(exporter, 1)
        assert attributes(span)["gen_ai.response.id"] == response["id"]
        assert attributes(span)["gen_ai.usage.output_tokens"] == 3


def test_spans_reach_a_collector_before_the_end(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received = ExportTraceServiceRequest()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.MergeFromString(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--otlp-traces-endpoint", endpoint) as server:
            answer = httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60
            ).json()
            server.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        collector.shutdown()
    sent = [span for each in received.resource_spans for scope in each.scope_spans for span in scope.spans]
    told = {attribute.key: attribute.value.string_value for span in sent for attribute in span.attributes}
    assert len(sent) == 1 and told["gen_ai.response.id"] == answer["id"]


def test_problems_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("localhost:4317", "ftp://x", "http://"):
        with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
            open_traces(wrong)
    with monkeypatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "pigeon")
        with pytest.raises(ConfigError, match="pigeon"):
            open_traces("http://localhost:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk "):
        open_traces("http://localhost:4317")
