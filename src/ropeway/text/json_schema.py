"""JSON Schemas made ready for the grammar compiler: what it would read loosely is refused, what it lacks is rewritten.

Every keyword is one that restricts texts exactly, one that restricts nothing, or refused by name. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropeway.errors import InvalidRequestError

MAX_DEPTH = 64
# The integers that every reader of JSON agrees on (RFC 8259, section 6). Further out the compiler recurses without end.
MAX_INTEGER = 2**53
# Keywords that hold one schema, a list of schemas, or schemas by name.
_ONE = frozenset({"items", "additionalProperties", "additionalItems"})
_MANY = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_EXACT = frozenset(
    {
        "type", "enum", "const", "required", "pattern", "format", "minLength", "maxLength", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties",
        "$ref", "$id", "$anchor", "$schema",
    }
)  # fmt: skip
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_SAYING_NOTHING = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
     "discriminator", "contentMediaType", "contentEncoding", "nullable", "strict"}
)  # fmt: skip
_KNOWN = _ONE | _MANY | _NAMED | _EXACT | _SAYING_NOTHING


def normalised_schema(schema: object) -> dict[str, Any]:
    """The schema with `oneOf` of branches that exclude each other as `anyOf`, which is the same then.

    Raises InvalidRequestError naming the keyword and where it stands, for one that is not supported.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"a JSON schema is an object, not {type(schema).__name__}")
    normalised: dict[str, Any] = _Normaliser(schema).normalise(schema, "schema", 0)
    return normalised


class _Normaliser:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def normalise(self, schema: Any, where: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InvalidRequestError(f"{where} must be a JSON schema, not {type(schema).__name__}")
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"{where[:80]}... is nested more than {MAX_DEPTH} schemas deep")
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword not in _KNOWN:
                raise InvalidRequestError(f"keyword {keyword[:40]!r} of {where} is not supported; leave it out")
            if keyword in ("discriminator", "nullable", "strict"):
                continue
            result[keyword] = self._value(keyword, value, where, depth)
        if "oneOf" in result:
            if "anyOf" in result or not self._exclude_each_other(schema["oneOf"]):
                raise InvalidRequestError(
                    f"keyword 'oneOf' of {where} is supported only where its schemas exclude each other by type, or by "
                    "a required property with other constants in each; use anyOf"
                )
            result["anyOf"] = result.pop("oneOf")
        return result

    def _value(self, keyword: str, value: Any, where: str, depth: int) -> Any:
        inside = f"{where}.{keyword}"
        if keyword in _ONE and isinstance(value, dict):
            return self.normalise(value, inside, depth + 1)
        if keyword in _MANY:
            if not isinstance(value, list) or not value:
                raise InvalidRequestError(f"{inside} must be a list of schemas")
            return [self.normalise(each, f"{inside}.{number}", depth + 1) for number, each in enumerate(value)]
        if keyword in _NAMED:
            if not isinstance(value, dict):
                raise InvalidRequestError(f"{inside} must be an object of schemas")
            return {name: self.normalise(each, f"{inside}.{name[:40]}", depth + 1) for name, each in value.items()}
        if keyword in _EXACT:
            _check_integers(keyword, value, inside)
        return value

    def _exclude_each_other(self, branches: list[Any]) -> bool:
        resolved = [self._resolved(branch) for branch in branches]
        types = [_types(branch) for branch in resolved]
        if all(types) and _are_disjoint(types):
            return True
        shared = set.intersection(*(set(branch.get("required", ())) for branch in resolved))
        return any(
            _are_disjoint([_constants(branch.get("properties", {}).get(name)) for branch in resolved])
            for name in sorted(map(str, shared))
        )

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#/"):
                return schema
            schema = self._root
            for part in reference[2:].split("/"):
                part = part.replace("~1", "/").replace("~0", "~")
                schema = schema.get(part) if isinstance(schema, dict) else None
        return {}


def _check_integers(keyword: str, value: Any, where: str) -> None:
    """Raises InvalidRequestError for an integer, or a bound, beyond MAX_INTEGER, at any depth."""
    is_bound, waiting = keyword in _BOUNDS, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            waiting += each.values() if isinstance(each, dict) else each
        elif isinstance(each, int | float) and abs(each) > MAX_INTEGER and (isinstance(each, int) or is_bound):
            raise InvalidRequestError(
                f"keyword {keyword!r}: {where} holds {each}; numbers there are supported from -2^53 to 2^53"
            )


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type", ())
    types = {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)}
    return frozenset("number" if each == "integer" else each for each in types)


def _constants(schema: Any) -> frozenset[str]:
    if not isinstance(schema, dict):
        return frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return frozenset(map(repr, values)) if isinstance(values, list) else frozenset()


def _are_disjoint(sets: list[frozenset[str]]) -> bool:
    """Whether every set holds something, and no two of them the same."""
    return all(sets) and len(frozenset.union(*sets)) == sum(map(len, sets))
