"""Bodies that are almost right: one field of a valid body changed, and some that are wrong altogether.

A case is made from (seed, number) alone, so a run can be resumed, and one case run again. Knows no HTTP and no server.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from support.api_bodies import ENDPOINTS, UPLOAD, Endpoint, valid_body

Kind = Literal["one field", "several fields", "bytes", "any JSON"]
KINDS: dict[Kind, int] = {"one field": 82, "several fields": 6, "bytes": 6, "any JSON": 6}  # of 100 cases

# Time limits that a client sets are not faults of the server when they run out, so no mutation sets a short one.
TIME_LIMITS = ("timeout", "queue_timeout")
SHORTEST_LIMIT_S = 1000
BOUNDARY = "5f2c"
FORM = f"multipart/form-data; boundary={BOUNDARY}"

_TEXTS = [
    "", " ", "\n", "x", "é", "🚡", "\u0000", "\u202e", "\ud800", "e\u0301", "none", "auto", "null", "true", "0", "-1",
    "1e999", "../../etc/passwd", "'; DROP TABLE x;--", "{{ 7 * 7 }}", "{% for x in y %}", "<|im_end|>", "<tool_call>",
    "</think>", "[TOOL_CALLS]", "%s%n", "\\", "(", "(a+)+$", "[a-", "a{1000000}", "start: start", 'start: "a"',
    "x" * 3000, "🚡" * 400,
]  # fmt: skip
_NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 5, 16, 20, 21, 64, 127, 128, 255, 256, 319, 320, 321, 1023, 1024, 1025, 4096, 65536, 2**31 - 1,
    2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**31), -(2**63), -(2**70), 0.0, -0.0, 0.5, 1.0, 1.5, -0.5,
    1e-9, 1e-320, 1e9, 1e308, -1e308, float("nan"), float("inf"), -float("inf"),
]  # fmt: skip
_OTHERS: list[Any] = [
    None, True, False, [], {}, [None], [[]], [{}], {"": None}, {"type": None}, {"type": "text"}, {"type": "object"},
    {"type": "function"}, ["x"], [1], [1, "x"], [[1], "x"], ["a"] * 300, [7] * 2000, {"$ref": "#"}, {"a": {"a": {}}},
]  # fmt: skip
_NAMES = [
    "n", "best_of", "suffix", "nonsense", "max_tokns", "tools", "functions", "thinking", "reasoning", "prompt",
    "messages", "input", "stream", "stream_options", "logprobs", "guided_json", "__class__", "constructor", "", "é",
    "x" * 200,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A POST: its path and body, and how the body came about. is_operation: it concerns requests of others too."""

    number: int
    path: str
    body: bytes
    kind: Kind

    @property
    def content_type(self) -> str:
        return FORM if self.path == "/v1/files" else "application/json"

    @property
    def is_operation(self) -> bool:
        return self.path in ("/pause", "/resume", "/abort_requests")


def fuzz_case(seed: int, number: int) -> Case:
    """The case of that number: always the same."""
    rng = random.Random(f"{seed}-{number}")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if rng.random() < 0.05:
        return Case(number, "/v1/files", _fuzzed_upload(rng, kind), kind)
    # Endpoints that take no body have nothing to mutate, and those with many fields much: they get cases accordingly.
    endpoint = rng.choices(ENDPOINTS, [1 if each.base is None else 6 + 2 * len(each.extras) for each in ENDPOINTS])[0]
    if kind == "any JSON":
        return Case(number, endpoint.path, _encoded(_any_value(rng, 4)), kind)
    body = valid_body(rng, endpoint)
    if kind == "bytes":
        return Case(number, endpoint.path, _with_wrong_bytes(rng, _encoded(body)), kind)
    for _ in range(1 if kind == "one field" else rng.randint(2, 5)):
        body = _mutated(rng, endpoint, body)
    return Case(number, endpoint.path, _encoded(body), kind)


def _fuzzed_upload(rng: random.Random, kind: Kind) -> bytes:
    """A form that uploads a file, changed in the manner of the kind."""
    if kind == "any JSON":
        return _encoded(_any_value(rng, 4))
    fields = dict(UPLOAD)
    for _ in range({"one field": 1, "several fields": 3}.get(kind, 0)):
        name = rng.choice([*UPLOAD, *_NAMES])
        if rng.random() < 0.2:
            fields.pop(name, None)
        else:
            fields[name] = rng.choice(_TEXTS) if name not in fields else str(_nudged(rng, fields[name]))
    parts = []
    for name, text in fields.items():
        more = '; filename="a.jsonl"' if name == "file" else ""
        parts.append(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{text}\r\n')
    data = ("".join(parts) + f"--{BOUNDARY}--\r\n").encode("utf-8", "surrogatepass")
    return _with_wrong_bytes(rng, data) if kind == "bytes" else data


def _encoded(value: Any) -> bytes:
    """JSON as Python writes it: with NaN and Infinity, and lone surrogates as escapes."""
    return json.dumps(value).encode()


def _mutated(rng: random.Random, endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    """A copy with one field, at any depth, changed, removed or added."""
    body = copy.deepcopy(body)
    action = rng.random()
    if action < 0.2 and endpoint.extras:
        body |= copy.deepcopy(rng.choice(endpoint.extras))  # valid by itself, perhaps not beside the rest
    elif action < 0.3:
        body[rng.choice(_NAMES)] = _any_value(rng, 2)
    elif action < 0.45 and endpoint.extras:
        name = rng.choice(list(rng.choice(endpoint.extras)))
        body[name] = _any_value(rng, 2)
    elif places := list(_places(body)):
        holder, key = rng.choice(places)
        _change(rng, holder, key)
    for name in TIME_LIMITS:
        value = body.get(name)
        if isinstance(value, int | float) and 0 < value < SHORTEST_LIMIT_S:
            body[name] = SHORTEST_LIMIT_S
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything within a value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _change(rng: random.Random, holder: Any, key: Any) -> None:
    changes: list[Callable[[], None]] = [
        lambda: holder.pop(key),
        lambda: holder.__setitem__(key, _any_value(rng, 2)),
        lambda: holder.__setitem__(key, _nudged(rng, holder[key])),
        lambda: holder.__setitem__(key, _nudged(rng, holder[key])),
    ]
    if isinstance(holder, dict):
        changes.append(lambda: holder.__setitem__(rng.choice(_NAMES), holder.pop(key)))
    rng.choice(changes)()


def _nudged(rng: random.Random, value: Any) -> Any:
    """A value of the same type, near the old one or at an edge."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice([value + 1, value - 1, -value, value * 10, rng.choice(_NUMBERS), float(value)])
        case float():
            return rng.choice([value / 2, value * 2, -value, rng.choice(_NUMBERS)])
        case str():
            at = rng.randint(0, len(value))
            return rng.choice([value[:at] + rng.choice(_TEXTS) + value[at:], value[:at], value.upper(), value * 2])
        case list():
            return rng.choice([value * 2, value[1:], [*value, _any_value(rng, 1)], value * 40])
        case dict():
            return {**value, rng.choice(_NAMES): _any_value(rng, 1)}
    return _any_value(rng, 1)


def _any_value(rng: random.Random, depth: int) -> Any:
    if depth and rng.random() < 0.25:
        if rng.random() < 0.5:
            return [_any_value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
        return {rng.choice([*_NAMES, *_TEXTS[:12]]): _any_value(rng, depth - 1) for _ in range(rng.randint(0, 4))}
    return copy.deepcopy(rng.choice(rng.choice([_TEXTS, _NUMBERS, _OTHERS])))


def _with_wrong_bytes(rng: random.Random, data: bytes) -> bytes:
    """The data with a few bytes cut, changed, doubled or added."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(changed))
        match rng.randrange(4):
            case 0:
                del changed[at : at + rng.randint(1, 8)]
            case 1:
                changed[at:at] = bytes([rng.randrange(256)])
            case 2:
                changed[at:at] = changed[at : at + rng.randint(1, 30)]
            case 3:
                del changed[at:]
    return bytes(changed)
