"""The input of `ropeway generate`: a line per prompt, in short or as batches have it. Knows no engine.

In short, a line is {"prompt": …} or {"messages": […]} with the fields of a request's body beside it, and perhaps an
`id`. It becomes the line of a batch that asks for the same: {"custom_id", "method", "url", "body"}, which may also be
given as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from ropeway.batch.lines import LINE_FIELDS
from ropeway.errors import ConfigError

URLS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


def batch_lines(path: Path, given: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[bytes]:
    """The lines of a batch for those of a file, each with its end; blank lines stay. given: fields of bodies that do
    not say otherwise; usual: more of them, for prompts in short.

    Raises ConfigError naming the line that is neither.
    """
    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            yield _batch_line(path, number, data, given, usual) + b"\n" if data.strip() else b"\n"


def _batch_line(path: Path, number: int, data: bytes, given: Mapping[str, Any], usual: Mapping[str, Any]) -> bytes:
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} line {number} is not JSON: {error}") from None
    if isinstance(fields, dict) and "custom_id" in fields and isinstance(fields.get("body"), dict):
        return orjson.dumps({**fields, "body": {**given, **fields["body"]}})
    kinds = [name for name in URLS if isinstance(fields, dict) and name in fields]
    if len(kinds) != 1:
        raise ConfigError(
            f"{path} line {number} must be a JSON object with either prompt or messages, or with "
            f"{', '.join(LINE_FIELDS)}"
        )
    custom_id = fields.pop("id", number)
    digest = hashlib.sha256(b"%d " % number + data.strip()).digest()
    # Made of the line's number and content, so that a run repeats.
    seed = int.from_bytes(digest[:8]) >> 1
    body = {**usual, **given, **{name: value for name, value in fields.items() if value is not None}}
    line = {"custom_id": str(custom_id), "method": "POST", "url": URLS[kinds[0]], "body": {"seed": seed, **body}}
    return orjson.dumps(line)
