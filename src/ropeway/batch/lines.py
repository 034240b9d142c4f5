"""The input of a batch: JSONL, a request per line. Checks what concerns the whole file; knows no bodies and no engine.

A line is {"custom_id", "method": "POST", "url", "body"}. What is wrong with a body is that line's own error, when it is
run; what is found here fails the batch before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

LINE_FIELDS = ("custom_id", "method", "url", "body")
MAX_CUSTOM_ID_CHARACTERS = 512
MAX_FAULTS = 50  # told of one file


@dataclass(frozen=True, slots=True)
class LineSpec:
    """One request of the file: start and num_bytes say where it lies. number: counted from 1, blank lines too."""

    number: int
    custom_id: str
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LineFault:
    """What is wrong with the file. line: None where no single one is to blame. Shaped as OpenAI's clients read it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class LineLimits:
    """num_lines: most of one file. line_bytes: most of one line."""

    num_lines: int
    line_bytes: int


def read_lines(path: Path, endpoint: str | None, limits: LineLimits) -> tuple[list[LineSpec], list[LineFault]]:
    """The requests of a file, and what is wrong with it: with any fault, none of them may run.

    endpoint: the url that every line must have; None leaves it to the lines.
    """
    specs: list[LineSpec] = []
    faults: list[LineFault] = []
    line_of: dict[str, int] = {}
    if not path.exists():
        return [], [LineFault("file_not_found", "the input file is no longer stored")]
    with path.open("rb") as file:
        for number, start, data in _raw_lines(file, limits.line_bytes):
            found = _fault(number, data, endpoint, limits)
            if isinstance(found, LineFault):
                faults.append(found)
            elif found in line_of:
                message = f"line {number} has the custom_id {found[:60]!r} of line {line_of[found]}; give each its own"
                faults.append(LineFault("duplicate_custom_id", message, number, "custom_id"))
            else:
                line_of[found] = number
                specs.append(LineSpec(number, found, start, len(data)))
            if len(specs) > limits.num_lines:
                message = f"the file has more than {limits.num_lines} requests; split it"
                faults.append(LineFault("too_many_requests", message))
            if len(faults) >= MAX_FAULTS or len(specs) > limits.num_lines:
                break
    if not specs and not faults:
        faults.append(LineFault("empty_file", "the file has no requests; give a JSON object per line"))
    return specs, faults


def _raw_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """(number, start, content) of the lines that are not blank; of one that is too long, only a part too long."""
    start = number = 0
    while data := file.readline(max_bytes + 2):
        number += 1
        next_start = start + len(data)
        if not data.endswith(b"\n"):
            while rest := file.readline(1 << 20):
                next_start += len(rest)
                if rest.endswith(b"\n"):
                    break
        if data.strip():
            yield number, start, data.rstrip(b"\r\n")
        start = next_start


def _fault(number: int, data: bytes, endpoint: str | None, limits: LineLimits) -> LineFault | str:
    """What is wrong with a line; its custom_id where nothing is."""

    def fault(message: str, param: str | None = None, code: str = "invalid_line") -> LineFault:
        return LineFault(code, f"line {number} {message}", number, param)

    if len(data) > limits.line_bytes:
        return fault(f"is longer than {limits.line_bytes} bytes", code="line_too_long")
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return fault(f"is not JSON in UTF-8: {error}", code="invalid_json_line")
    if not isinstance(fields, dict):
        return fault("must be a JSON object")
    unknown = sorted(fields.keys() - set(LINE_FIELDS))
    if unknown:
        return fault(f"has the unknown field {unknown[0][:60]!r}; a line has {', '.join(LINE_FIELDS)}", unknown[0][:60])
    wrong = _wrong_field(fields, endpoint)
    return fault(*wrong) if wrong else str(fields["custom_id"])


def _wrong_field(fields: dict[str, Any], endpoint: str | None) -> tuple[str, str] | None:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        return f"needs a custom_id of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters", "custom_id"
    if fields.get("method") != "POST":
        return 'needs "method": "POST"', "method"
    url = fields.get("url")
    if not isinstance(url, str) or url != (endpoint or url):
        return f"has the url {str(url)[:60]!r}, and the batch is for {endpoint}", "url"
    if not isinstance(fields.get("body"), dict):
        return "needs a body that is a JSON object", "body"
    return None
