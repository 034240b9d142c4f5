"""`ropeway batch`: gives a server a file of requests, tells how far it is, and fetches the answers."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ropeway.cli.options import API_KEY_VARIABLE
from ropeway.errors import BatchStoreError, ConfigError

POLL_S = 1.0
TIMEOUT_S = 60.0
CHUNK_BYTES = 1 << 20
KEY_VARIABLES = (API_KEY_VARIABLE, "OPENAI_API_KEY")
ENDED = ("completed", "failed", "expired", "cancelled")

Fields = dict[str, Any]


def add_parser(subparsers: Any) -> None:
    """Adds `batch` and its own commands."""
    parser = subparsers.add_parser(
        "batch",
        help="have a server answer a file of requests",
        description="Gives a running server a JSONL file of requests ({custom_id, method, url, body} per line), which "
        "it answers whenever there is room, and whatever happens to it meanwhile.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, summary: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = cast(argparse.ArgumentParser, commands.add_parser(name, help=summary, allow_abbrev=False))
        command.set_defaults(run=run)
        command.add_argument("--url", default="http://127.0.0.1:8000", help="of the server; default: %(default)s")
        command.add_argument("--api-key", metavar="KEY", help=f"default: ${' or $'.join(KEY_VARIABLES)}")
        return command

    submit = add("submit", "upload a file and begin its batch; prints the batch's id", run_submit)
    submit.add_argument("file", type=Path, metavar="FILE", help="JSONL of requests")
    submit.add_argument("--endpoint", help="what every line asks for; default: the url of the first line")
    submit.add_argument("--wait", action="store_true", help="until it has ended, showing how far it is")
    for name, summary, run in (
        ("status", "how far a batch is, as JSON", run_status),
        ("cancel", "end a batch, and keep what was answered", run_cancel),
        ("fetch", "the answers of a batch that has ended, in the order of its lines", run_fetch),
    ):
        add(name, summary, run).add_argument("batch_id", metavar="ID")
    fetch = commands.choices["fetch"]
    fetch.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write them; default: stdout")
    fetch.add_argument("--errors", type=Path, metavar="FILE", help="where to write the lines without an answer; "
        "default: only their number is told")  # fmt: skip


def run_submit(args: argparse.Namespace) -> int:
    """Uploads and begins; with --wait 0 only where every line was answered."""
    server = _Server.of(args)
    endpoint = args.endpoint or _first_url(args.file)
    file_id = server.upload(args.file)["id"]
    fields = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
    batch = server.call("POST", "/v1/batches", fields)
    print(batch["id"], flush=True)
    if not args.wait:
        return 0
    from tqdm import tqdm

    # None: shown where stderr is a terminal.
    with tqdm(unit="line", disable=None) as bar:
        while batch["status"] not in ENDED:
            time.sleep(POLL_S)
            batch = server.call("GET", f"/v1/batches/{batch['id']}")
            counts = batch["request_counts"]
            bar.total = counts["total"]
            bar.update(counts["completed"] + counts["failed"] - bar.n)
    return _tell_end(batch)


def run_status(args: argparse.Namespace) -> int:
    """Prints the batch."""
    print(json.dumps(_Server.of(args).call("GET", f"/v1/batches/{args.batch_id}"), indent=2))
    return 0


def run_cancel(args: argparse.Namespace) -> int:
    """Cancels, and prints the status."""
    print(_Server.of(args).call("POST", f"/v1/batches/{args.batch_id}/cancel")["status"])
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    """Writes the answers; 0 only where every line was answered."""
    server = _Server.of(args)
    batch = server.call("GET", f"/v1/batches/{args.batch_id}")
    if batch["status"] not in ENDED:
        counts = batch["request_counts"]
        raise BatchStoreError(
            f"{args.batch_id} is {batch['status']}, with {counts['completed'] + counts['failed']} of "
            f"{counts['total']} lines answered; fetch it when it has ended"
        )
    if batch["output_file_id"] is not None:
        if args.output is None:
            server.download(batch["output_file_id"], sys.stdout.buffer)
            sys.stdout.flush()
        else:
            server.download_to(batch["output_file_id"], args.output)
    if batch["error_file_id"] is not None and args.errors is not None:
        server.download_to(batch["error_file_id"], args.errors)
    return _tell_end(batch)


def _tell_end(batch: Fields) -> int:
    """What has become of a batch, on stderr; 0 where every line was answered."""
    counts = batch["request_counts"]
    told = f"{batch['id']} is {batch['status']}: {counts['completed']} of {counts['total']} lines answered"
    for fault in (batch["errors"] or {"data": []})["data"]:
        told += f"\n{fault['message']}"
    print(told, file=sys.stderr)
    return 0 if batch["status"] == "completed" and counts["completed"] == counts["total"] else 1


def _first_url(path: Path) -> str:
    with path.open("rb") as file:
        line = next((each for each in file if each.strip()), b"")
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"the first line of {path} has no url; give an --endpoint, or put it right") from None


class _Server:
    """The few calls that a batch takes. Raises BatchStoreError with what the server says is wrong."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    @staticmethod
    def of(args: argparse.Namespace) -> _Server:
        named = (os.environ.get(name) for name in KEY_VARIABLES)
        return _Server(args.url, args.api_key or next((key for key in named if key), None))

    def call(self, method: str, path: str, fields: Fields | None = None) -> Fields:
        data = None if fields is None else json.dumps(fields).encode()
        with self._open(method, path, data, {"Content-Type": "application/json"}) as answer:
            return cast(Fields, json.load(answer))

    def upload(self, path: Path) -> Fields:
        """The file as multipart/form-data, read as it is sent."""
        boundary = secrets.token_hex(16)
        name = path.name.encode("ascii", "replace").decode().replace('"', "_")
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n'
            f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        with path.open("rb") as file:
            num_bytes = len(head) + os.fstat(file.fileno()).st_size + len(tail)
            headers = {
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(num_bytes),
            }
            with self._open("POST", "/v1/files", _parts(head, file, tail), headers) as answer:
                return cast(Fields, json.load(answer))

    def download(self, file_id: str, target: BinaryIO) -> None:
        with self._open("GET", f"/v1/files/{file_id}/content", None, {}) as answer:
            shutil.copyfileobj(answer, target, CHUNK_BYTES)

    def download_to(self, file_id: str, path: Path) -> None:
        with path.open("wb") as file:
            self.download(file_id, file)

    def _open(self, method: str, path: str, data: bytes | Iterator[bytes] | None, headers: dict[str, str]) -> Any:
        try:
            request = urllib.request.Request(self._url + path, data, {**self._headers, **headers}, method=method)
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                raise BatchStoreError(f"{self._url} refused: {_message(error)} ({error.code})") from None
        except (urllib.error.URLError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise BatchStoreError(f"{self._url} cannot be reached: {reason}; is the server running there?") from None
        except ValueError:
            raise ConfigError(f"{self._url!r} is not an HTTP address; give one like http://127.0.0.1:8000") from None


def _parts(head: bytes, file: BinaryIO, tail: bytes) -> Iterator[bytes]:
    yield head
    while data := file.read(CHUNK_BYTES):
        yield data
    yield tail


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return error.reason
