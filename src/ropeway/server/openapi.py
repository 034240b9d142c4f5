"""The OpenAPI document of the server: its paths, and the bodies that they take. Knows no routes."""

from __future__ import annotations

import functools
import re
from typing import Any

from pydantic import BaseModel

from ropeway._version import __version__
from ropeway.server.bodies import AbortBody, BatchBody, DetokenizeBody, TokenizeBody
from ropeway.server.messages_body import CountTokensBody, MessagesBody
from ropeway.server.protocol import ChatBody, CompletionBody
from ropeway.server.responses_body import ResponsesBody

_POSTS: dict[str, tuple[str, type[BaseModel] | None]] = {
    "/v1/completions": ("Completes a prompt, or several", CompletionBody),
    "/v1/chat/completions": ("Answers a conversation", ChatBody),
    "/v1/messages": ("Answers a conversation, in Anthropic's shape", MessagesBody),
    "/v1/messages/count_tokens": ("The length of a conversation in tokens, in Anthropic's shape", CountTokensBody),
    "/v1/responses": ("Answers an input, and keeps the conversation", ResponsesBody),
    "/v1/responses/{response_id}/cancel": ("Ends a response that is in progress", None),
    "/v1/batches": ("Answers the requests of a file, whenever there is room", BatchBody),
    "/v1/batches/{batch_id}/cancel": ("Ends a batch, and keeps what was answered", None),
    "/tokenize": ("The tokens of a prompt, or of a conversation", TokenizeBody),
    "/detokenize": ("The text of tokens", DetokenizeBody),
    "/abort_requests": ("Ends requests, whoever's they are", AbortBody),
    "/pause": ("Plans nothing more: requests keep their memory and queue up", None),
    "/resume": ("Goes on", None),
}
_GETS = {
    "/v1/models": "The names that requests may give",
    "/v1/models/{model_id}": "One of them",
    "/v1/responses/{response_id}": "A stored response",
    "/v1/files": "The files of the caller, newest first",
    "/v1/files/{file_id}": "One of them",
    "/v1/files/{file_id}/content": "What it holds",
    "/v1/batches": "The batches of the caller, newest first",
    "/v1/batches/{batch_id}": "One of them, with its progress",
    "/v1/requests/{request_id}": "What has become of a request: by the id of its answer, or its x-request-id",
    "/tokenizer_info": "The tokenizer's marks, and the chat template",
    "/health": "Whether the engine makes progress",
    "/ping": "The same as /health",
    "/ready": "Whether a request sent now would be served",
    "/version": "The version of the server",
    "/metrics": "Counters and gauges in Prometheus' text format",
    "/openapi.json": "This document",
    "/docs": "This document as a page",
}
_DELETES = {
    "/v1/responses/{response_id}": "Forgets a stored response",
    "/v1/files/{file_id}": "Forgets a file",
}
_PAGED = {"/v1/files": ("after", "limit", "order", "purpose"), "/v1/batches": ("after", "limit")}
_UPLOAD = {
    "title": "Upload",
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    },
    "required": ["file", "purpose"],
}


@functools.cache
def openapi_document() -> dict[str, object]:
    """OpenAPI 3.1, as JSON-ready values; made once, which takes milliseconds and leaves circles behind."""
    schemas: dict[str, object] = {}
    paths: dict[str, dict[str, object]] = {}
    for path, (summary, body) in _POSTS.items():
        paths.setdefault(path, {})["post"] = _post(path, summary, body, schemas)
    for method, summaries in (("get", _GETS), ("delete", _DELETES)):
        for path, summary in summaries.items():
            paths.setdefault(path, {})[method] = _operation(path, summary)
    for path, names in _PAGED.items():
        query = [{"name": name, "in": "query", "required": False, "schema": {"type": "string"}} for name in names]
        paths[path]["get"] = {**_operation(path, _GETS[path]), "parameters": query}
    schemas["Upload"] = _UPLOAD
    reference = {"$ref": "#/components/schemas/Upload"}
    upload = {"required": True, "content": {"multipart/form-data": {"schema": reference}}}
    paths["/v1/files"]["post"] = {**_operation("/v1/files", "Stores a file for a batch"), "requestBody": upload}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ropeway", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _post(path: str, summary: str, body: type[BaseModel] | None, schemas: dict[str, object]) -> dict[str, object]:
    if body is None:
        return _operation(path, summary)
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[body.__name__] = schema
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    request_body = {"required": True, "content": {"application/json": {"schema": reference}}}
    return {**_operation(path, summary), "requestBody": request_body}


def _operation(path: str, summary: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "Success"}}}
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation
