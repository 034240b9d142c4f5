"""The OpenAPI document of the server: its paths, and the bodies that they take. Knows no routes."""

from __future__ import annotations

from typing import Any

from ropeway._version import __version__
from ropeway.server.protocol import ChatBody, CompletionBody, SamplingBody

_POSTS: dict[str, tuple[str, type[SamplingBody]]] = {
    "/v1/completions": ("Completes a prompt, or several", CompletionBody),
    "/v1/chat/completions": ("Answers a conversation", ChatBody),
}
_GETS = {
    "/v1/models": "The names that requests may give",
    "/v1/models/{model_id}": "One of them",
    "/health": "Whether the engine makes progress",
    "/ping": "The same as /health",
    "/version": "The version of the server",
    "/metrics": "Counters and gauges in Prometheus' text format",
}


def openapi_document() -> dict[str, object]:
    """OpenAPI 3.1, as JSON-ready values."""
    schemas: dict[str, object] = {}
    paths = {path: {"post": _post(summary, body, schemas)} for path, (summary, body) in _POSTS.items()}
    paths |= {path: {"get": _operation(path, summary)} for path, summary in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ropeway", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _post(summary: str, body: type[SamplingBody], schemas: dict[str, object]) -> dict[str, object]:
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[body.__name__] = schema
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    request_body = {"required": True, "content": {"application/json": {"schema": reference}}}
    return {**_operation("", summary), "requestBody": request_body}


def _operation(path: str, summary: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "Success"}}}
    if "{model_id}" in path:
        schema = {"type": "string"}
        operation["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": schema}]
    return operation
