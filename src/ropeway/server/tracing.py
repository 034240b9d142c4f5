"""Traces: a span for every request to generate, by OpenTelemetry's conventions for generative AI. Knows no texts.

A span begins when the request arrives, as a child of the caller's where it sent a `traceparent`, and ends with the
engine's work, or with the refusal. It holds lengths, times and parameters; no prompts, answers, headers or keys.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ropeway._version import __version__
from ropeway.core.params import Request
from ropeway.engine.request_report import RequestReport
from ropeway.errors import ConfigError
from ropeway.server.request_ids import REQUEST_ID, STATUS
from ropeway.server.sse import Message, Receive, Send

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PACKAGES = (
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-exporter-otlp-proto-http",
)
FLUSH_S = 2.0
MAX_SPAN_INTEGER = 2**63 - 1


@dataclass(slots=True)
class _Traced:
    """A request over HTTP, and whether the engine has it: then the span is the engine's to end."""

    span: Span
    is_submitted: bool = False


_current: ContextVar[_Traced | None] = ContextVar("traced_request", default=None)


class RequestTraces:
    """The spans of requests under way. Belongs to the event loop.

    processor: where ended spans go. Needs the packages of the extra `otel`.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "ropeway"}
        provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
        provider.add_span_processor(processor)
        self._processor = processor
        self._tracer = provider.get_tracer("ropeway", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._spans: dict[str, Span] = {}  # by answer id, of what the engine has

    def wrap(self, app: Any) -> Callable[[Message, Receive, Send], Any]:
        """The application, with a span around every request to generate."""

        async def traced(scope: Message, receive: Receive, send: Send) -> None:
            operation = OPERATIONS.get(scope.get("path", ""))
            if operation is None or scope.get("method") != "POST":
                await app(scope, receive, send)
                return
            request = _Traced(self._begin(scope, operation))
            _current.set(request)  # the task is the request's own
            try:
                await app(scope, receive, send)
            finally:
                if not request.is_submitted:
                    _end_refused(request.span, scope[STATUS])

        return traced

    def on_submitted(self, answer_id: str, requests: Sequence[Request]) -> None:
        """The engine has the requests of an answer, which came with the request that is being served."""
        request = _current.get()
        if request is None or request.is_submitted:
            return
        request.is_submitted = True
        self._spans[answer_id] = request.span
        request.span.set_attributes({"gen_ai.response.id": answer_id, **_asked(requests)})

    def on_ended(self, answer_id: str, reports: Sequence[RequestReport]) -> None:
        """Every request of an answer has ended."""
        from opentelemetry.trace import StatusCode

        span = self._spans.pop(answer_id, None)
        if span is None:
            return
        span.set_attributes(_happened(reports))
        error = next((report.error for report in reports if report.error is not None), None)
        if any(report.has_failed for report in reports):
            span.set_attribute("error.type", "error" if error is None else type(error).__name__)
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Sends what has not been sent yet, for FLUSH_S at most."""
        # It waits for a collector that does not answer, and longer than anybody who stops a server would.
        sending = threading.Thread(target=self._processor.shutdown, daemon=True)
        sending.start()
        sending.join(FLUSH_S)

    def _begin(self, scope: Message, operation: str) -> Span:
        from opentelemetry.trace import SpanKind

        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return self._tracer.start_span(
            f"POST {scope['path']}",
            self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "ropeway",
                "http.request.method": "POST",
                "url.path": scope["path"],
                "ropeway.request_id": scope[REQUEST_ID],
            },
        )


def open_traces(endpoint: str) -> RequestTraces:
    """Traces that go to a collector. Raises ConfigError for no URL, and where the packages are missing."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--otlp-traces-endpoint {endpoint[:100]!r} is no URL; write http://HOST:PORT")
    protocol = next((value for name in PROTOCOL_VARIABLES if (value := os.environ.get(name))), "grpc")
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

        exporter: SpanExporter
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            exporter = GrpcExporter(endpoint=endpoint)
        elif protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            exporter = HttpExporter(endpoint=endpoint)
        else:
            raise ConfigError(f"{PROTOCOL_VARIABLES[0]} is {protocol[:40]!r}; known: grpc, http/protobuf")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install {' '.join(PACKAGES)}"
        ) from None
    return RequestTraces(BatchSpanProcessor(exporter))


def _end_refused(span: Span, status: int) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("http.response.status_code", status)
    if status >= 400:
        span.set_attribute("error.type", str(status))
    if status >= 500:
        span.set_status(StatusCode.ERROR)
    span.end()


def _asked(requests: Sequence[Request]) -> dict[str, Any]:
    """What was asked for, of the first request: they differ in their prompts only."""
    request = requests[0]
    params = request.params
    asked: dict[str, Any] = {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
    }
    if request.seed <= MAX_SPAN_INTEGER:
        asked["gen_ai.request.seed"] = request.seed
    if len(requests) * params.n > 1:
        asked["gen_ai.request.choice.count"] = len(requests) * params.n
    return asked


def _happened(reports: Sequence[RequestReport]) -> dict[str, Any]:
    """What became of an answer. Times in seconds, as vLLM names them: of the first request that got so far."""
    arrival_s = min(report.arrival_s for report in reports)
    scheduled = [report.first_scheduled_s for report in reports if report.first_scheduled_s is not None]
    begun = [report.first_token_s for report in reports if report.first_token_s is not None]
    ended = [report.end_s for report in reports if report.end_s is not None]
    happened: dict[str, Any] = {
        "gen_ai.usage.input_tokens": sum(report.num_prompt_tokens for report in reports),
        "gen_ai.usage.output_tokens": sum(report.num_generated_tokens for report in reports),
        "gen_ai.usage.cache_read.input_tokens": sum(report.num_cached_tokens for report in reports),
        "gen_ai.response.finish_reasons": [reason for each in reports for reason in each.finish_reasons if reason],
    }
    times = (("time_in_queue", scheduled, min), ("time_to_first_token", begun, min), ("e2e", ended, max))
    for name, moments, which in times:
        if moments:
            happened[f"gen_ai.latency.{name}"] = which(moments) - arrival_s
    return happened
