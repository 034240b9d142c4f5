"""JSON schemas that refer to themselves, followed to a bounded depth: so an answer ends whatever the model would like.

A reference into a cycle leads to a copy of its target one level deeper; the deepest level may not refer any further.
What fits the result fits the schema. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ropeway.errors import InvalidRequestError

MAX_RECURSION = 8
_COPIES = "recursion"  # the definitions that the copies live in

# Keywords whose values are data, in which "$ref" means nothing.
_DATA = frozenset({"const", "enum", "default", "examples", "example"})


def bounded_recursion(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with every cycle of references unrolled to MAX_RECURSION levels; itself where there is none.

    Raises InvalidRequestError for a reference that leads nowhere or out of the schema.
    """
    cyclic = _cyclic_targets(schema)
    if not cyclic:
        return schema
    copies: dict[str, Any] = {}
    numbers = {target: number for number, target in enumerate(sorted(cyclic))}

    def at_level(node: Any, level: int) -> Any:
        if isinstance(node, list):
            return [at_level(each, level) for each in node]
        if not isinstance(node, dict):
            return node
        target = node.get("$ref")
        if isinstance(target, str) and target in numbers:
            return {"$ref": f"#/{_COPIES}/{numbers[target]}-{level}"} if level < MAX_RECURSION else False
        return {key: value if key in _DATA else at_level(value, level) for key, value in node.items()}

    for target, number in numbers.items():
        for level in range(MAX_RECURSION):
            copies[f"{number}-{level}"] = at_level(_without_definitions(_found(schema, target)), level + 1)
    root = at_level(schema, 0)
    assert isinstance(root, dict), "level 0 is not the deepest"
    return {**root, _COPIES: copies}


def _cyclic_targets(schema: dict[str, Any]) -> set[str]:
    """The targets of references that lead back to themselves."""
    leads_to: dict[str, set[str]] = {}
    waiting = list(_references(schema))
    while waiting:
        target = waiting.pop()
        if target not in leads_to:
            # A definition that stands inside another is reached by a reference of its own.
            leads_to[target] = set(_references(_without_definitions(_found(schema, target))))
            waiting += leads_to[target]
    return {target for target in leads_to if target in _reached(leads_to, target)}


def _reached(leads_to: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = list(leads_to[start])
    while waiting:
        target = waiting.pop()
        if target not in reached:
            reached.add(target)
            waiting += leads_to[target]
    return reached


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for each in node:
            yield from _references(each)
    elif isinstance(node, dict):
        target = node.get("$ref")
        if isinstance(target, str):
            yield target
        for key, value in node.items():
            if key not in _DATA:
                yield from _references(value)


def _without_definitions(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    return {key: value for key, value in node.items() if key not in ("$defs", "definitions")}


def _found(schema: Any, target: str) -> Any:
    if target != "#" and not target.startswith("#/"):
        raise InvalidRequestError(f"keyword '$ref': {target[:80]!r} leads out of the schema; use #/$defs/NAME")
    node = schema
    for part in target[2:].split("/") if target != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            raise InvalidRequestError(f"keyword '$ref': {target[:80]!r} leads nowhere")
    return node
