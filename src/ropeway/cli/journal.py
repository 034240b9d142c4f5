"""JSONL in, JSONL out, resumable: which input lines are answered, keyed by line number and content hash.

The hash covers the line, the model's name and the default parameters, so that one output file never holds answers to
two different questions. A line that was cut off in writing is removed and answered again. Knows no engine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from ropeway.core.params import SamplingParams
from ropeway.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from ropeway.inputs import EncodedPrompt
    from ropeway.llm import LLM
    from ropeway.outputs import RequestOutput

HASH_HEX_DIGITS = 32
PROMPT_FIELDS = ("prompt", "messages")
SAMPLING_FIELDS = tuple(SamplingParams.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class InputLine:
    """One prompt of the input file. number: counted from 1."""

    number: int
    content_hash: str
    fields: Mapping[str, Any]

    def request(self, llm: LLM, defaults: Mapping[str, Any]) -> tuple[EncodedPrompt, SamplingParams]:
        """What to run, checked against the model. Raises InvalidRequestError.

        A seed that nobody gave comes from the line's number and content, so that a run repeats.
        """
        digest = hashlib.sha256(f"{self.number} {self.content_hash}".encode()).digest()
        defaults = {"seed": int.from_bytes(digest[:8]), **defaults}
        given = {name: self.fields[name] for name in SAMPLING_FIELDS if self.fields.get(name) is not None}
        params = SamplingParams(**{**defaults, **given})
        prompt = (
            llm.encode_chat(self.fields["messages"]) if "messages" in self.fields else llm.encode(self.fields["prompt"])
        )
        llm.check(prompt, params)
        return prompt, params


def read_input(path: Path, context: Mapping[str, Any]) -> list[InputLine]:
    """The lines of a prompts file; `context` is what else decides the answers. Blank lines are skipped.

    Raises ConfigError naming the line that is not a JSON object with a prompt and known fields.
    """
    salt = orjson.dumps(context, option=orjson.OPT_SORT_KEYS)
    lines = []
    with path.open("rb") as file:
        for number, data in enumerate(file, start=1):
            if data.strip():
                digest = hashlib.sha256(salt + b"\n" + data.strip()).hexdigest()[:HASH_HEX_DIGITS]
                lines.append(InputLine(number, digest, _fields(path, number, data)))
    if not lines:
        raise ConfigError(f"{path} holds no prompts; give a JSON object per line")
    return lines


def _fields(path: Path, number: int, data: bytes) -> Mapping[str, Any]:
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} line {number} is not JSON: {error}") from None
    if not isinstance(fields, dict) or sum(name in fields for name in PROMPT_FIELDS) != 1:
        raise ConfigError(f"{path} line {number} must be a JSON object with either prompt or messages")
    unknown = fields.keys() - {*PROMPT_FIELDS, *SAMPLING_FIELDS, "id"}
    if unknown:
        raise ConfigError(f"{path} line {number} has the unknown field {min(unknown)!r}")
    return fields


class Journal:
    """The output file. Open it before any work: it says what is left to do, and is locked against a second run."""

    def __init__(self, path: Path, lines: Sequence[InputLine]) -> None:
        self._path = path
        self._lines = lines
        self._answered: set[int] = set()
        self.num_refused = 0

    def __enter__(self) -> Journal:
        if self._path.exists() and not self._path.is_file():
            raise ConfigError(f"{self._path} is not a regular file, so no run could be resumed from it; give one")
        self._file = self._path.open("a+b", buffering=0)
        try:
            self._lock()
            self._recover()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def unanswered(self) -> list[InputLine]:
        return [line for line in self._lines if line.number not in self._answered]

    def write_answer(self, line: InputLine, output: RequestOutput) -> None:
        """Stores an answer. Raises OSError where it cannot, leaving the file as it was."""
        self._write(
            line,
            {
                "outputs": [
                    {"text": each.text, "token_ids": each.token_ids, "finish_reason": each.finish_reason}
                    for each in output.outputs
                ],
                "num_prompt_tokens": len(output.prompt_token_ids),
                "seed": output.seed,
            },
        )

    def write_error(self, line: InputLine, error: InvalidRequestError) -> None:
        """Stores that a line was refused, and why."""
        self.num_refused += 1
        self._write(line, {"error": {"message": str(error), "param": error.param}})

    def _write(self, line: InputLine, answer: Mapping[str, Any]) -> None:
        head: dict[str, Any] = {"line": line.number, "hash": line.content_hash}
        if "id" in line.fields:
            head["id"] = line.fields["id"]
        data = orjson.dumps({**head, **answer}) + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        num_written = 0
        try:
            while num_written < len(data):
                num_written += self._file.write(data[num_written:])
        except OSError as error:
            self._file.truncate(start)
            raise OSError(
                error.errno, f"{error.strerror}; free some space and run the same command again", str(self._path)
            ) from error
        self._answered.add(line.number)

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self._path} is being written by another run; give another --output") from None

    def _recover(self) -> None:
        """Reads what is answered; drops a last line that was cut off."""
        hash_of = {line.number: line.content_hash for line in self._lines}
        self._file.seek(0)
        data = self._file.read()
        end = data.rfind(b"\n") + 1
        for position, text in enumerate(data[:end].splitlines(), start=1):
            try:
                answer = orjson.loads(text)
                number, content_hash = answer["line"], answer["hash"]
            except (orjson.JSONDecodeError, KeyError, TypeError):
                raise ConfigError(
                    f"{self._path} line {position} is not an answer of an earlier run; give another --output"
                ) from None
            if hash_of.get(number) != content_hash:
                raise ConfigError(
                    f"{self._path} answers another question at input line {number}: the input, the model or the "
                    "sampling flags have changed since; give another --output, or remove it to start over"
                )
            self._answered.add(number)
            self.num_refused += "error" in answer
        self._file.truncate(end)
