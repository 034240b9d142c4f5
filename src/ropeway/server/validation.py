"""What is wrong with a body, in words that name the field. Knows no bodies."""

from __future__ import annotations

from pydantic import ValidationError

from ropeway.errors import InvalidRequestError


def from_validation(error: ValidationError) -> InvalidRequestError:
    """The first fault of a body, by the name of its field."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    param = str(first["loc"][0]) if first["loc"] else None
    match first["type"]:
        case "extra_forbidden":
            return InvalidRequestError(
                f"unknown field {path[:100]!r}; see docs/serving.md for those served", param=param
            )
        case "missing":
            return InvalidRequestError(f"{path} is required", param=param)
    given = json_type(first["input"])
    return InvalidRequestError(f"{path}: {first['msg'][:1].lower()}{first['msg'][1:]}, not {given}", param=param)


def json_type(value: object) -> str:
    """What a decoded JSON value is, in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the string {value[:40]!r}"
        case list():
            return "an array" if value else "an empty array"
        case _:
            return "an object"
