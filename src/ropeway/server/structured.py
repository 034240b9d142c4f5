"""`response_format` and `structured_outputs`: what an answer must follow, as a grammar. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropeway.errors import InvalidRequestError
from ropeway.text.grammar import json_object_grammar, json_schema_grammar, structured_output_grammar


def grammar_of(response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None) -> str | None:
    """The grammar that the two fields ask for; None where they ask for free text.

    Raises InvalidRequestError naming the field and what is wrong in it.
    """
    by_format = _named("response_format", lambda: _format_grammar(response_format or {"type": "text"}))
    if structured_outputs is None:
        return by_format
    if by_format is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both say what the answer must be; give one",
            param="structured_outputs",
        )
    return _named("structured_outputs", lambda: structured_output_grammar(structured_outputs))


# The types of response_format, and what each may hold beside it. llama.cpp's server takes a schema with json_object.
_FORMAT_FIELDS: dict[str, set[str]] = {"text": set(), "json_object": {"schema"}, "json_schema": {"json_schema"}}


def _format_grammar(response_format: Mapping[str, Any]) -> str | None:
    kind = response_format.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        raise InvalidRequestError(f"type must be text, json_object or json_schema, not {str(kind)[:40]!r}")
    given = {name: value for name, value in response_format.items() if name != "type" and value is not None}
    unknown = given.keys() - _FORMAT_FIELDS[kind]
    if unknown:
        known = " and ".join(["type", *_FORMAT_FIELDS[kind]])
        raise InvalidRequestError(f"unknown field {min(unknown)[:40]!r}; where type is {kind} it holds {known}")
    if kind == "json_schema":
        return _schema_grammar(given.get("json_schema"))
    if "schema" in given:
        return json_schema_grammar(given["schema"])
    return json_object_grammar() if kind == "json_object" else None


def _schema_grammar(wrapped: object) -> str:
    """OpenAI wraps a schema: {"name", "description", "strict", "schema"}. It is followed, strict or not."""
    if not isinstance(wrapped, dict):
        raise InvalidRequestError("json_schema must be an object with a schema")
    unknown = wrapped.keys() - {"name", "description", "strict", "schema"}
    if unknown:
        raise InvalidRequestError(f"json_schema has the unknown field {min(unknown)[:40]!r}")
    if "schema" not in wrapped:
        raise InvalidRequestError("json_schema.schema is required")
    return json_schema_grammar(wrapped["schema"])


def _named(field: str, make: Any) -> str | None:
    try:
        found: str | None = make()
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{field}: {error}", param=field) from None
    return found
