"""Output and error files of a batch, put together from its journal. Knows no engine and no HTTP.

A line of the output file is {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}, in the
order of the input. Requests that were answered with an error are in the error file, and so are those that never ran:
there `response` is null, and `error` says why.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson

from ropeway.batch.directory import NewFile
from ropeway.batch.journal import Journal
from ropeway.batch.records import LineAnswer
from ropeway.line_ends import escaped_line_ends

_NEVER_RAN = {
    "expired": ("batch_expired", "This request was not answered before the batch expired."),
    "cancelled": ("batch_cancelled", "This request was not answered before the batch was cancelled."),
}


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """Bytes of the output and of the error file; None where there is none."""

    output_bytes: int | None
    error_bytes: int | None


def write_results(journal_path: Path, batch: int, status: str, output_path: Path, error_path: Path) -> WrittenFiles:
    """Writes both files of a batch that ends with `status`, on a connection of its own. The same path twice makes one
    file of both.

    Raises OSError, sqlite3.Error.
    """
    journal = Journal(journal_path)
    paths = {True: output_path, False: error_path}
    written: dict[Path, NewFile] = {}
    try:
        with ExitStack() as stack:
            for number, custom_id, answer in journal.results(batch):
                path = paths[answer is not None and answer.is_success]
                if path not in written:
                    written[path] = stack.enter_context(NewFile(path))
                written[path].content.write(result_line(batch, number, custom_id, answer, status))
    finally:
        journal.close()
    sizes = {path: file.num_bytes for path, file in written.items()}
    return WrittenFiles(sizes.get(output_path), sizes.get(error_path))


def result_line(batch: int, number: int, custom_id: str, answer: LineAnswer | None, status: str) -> bytes:
    """One line, with its end, and without another. status: of the batch, which says why there is no answer."""
    return escaped_line_ends(_json(batch, number, custom_id, answer, status)) + b"\n"


def _json(batch: int, number: int, custom_id: str, answer: LineAnswer | None, status: str) -> bytes:
    head = orjson.dumps({"id": f"batch_req_{batch}_{number}", "custom_id": custom_id})[:-1]
    if answer is None:
        code, message = _NEVER_RAN[status]
        error = orjson.dumps({"code": code, "message": message})
        return head + b',"response":null,"error":' + error + b"}"
    response = orjson.dumps({"status_code": answer.status_code, "request_id": answer.request_id})[:-1]
    return head + b',"response":' + response + b',"body":' + answer.body + b'},"error":null}'
