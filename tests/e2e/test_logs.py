"""The log as JSON: nothing but objects, requests by name, failures with their traceback, and never a key."""

from __future__ import annotations

import io
import json
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tests.e2e.conftest import ENGINE_FLAGS
from tests.e2e.test_lifecycle import run_command
from tests.support.running_server import RunningServer, wait_until

from ropeway.server.failures import FailureGuard
from ropeway.server.logs import begin_logging
from ropeway.server.request_ids import RequestIds
from ropeway.server.traffic import Traffic

SECRETS = ("s3cret-0f-lab", "b0ss-key", "wr0ng-key", "qu3ry-key", "f1le-key")
BODY = {"prompt": "a", "max_tokens": 2}


def objects(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines()]


def test_every_line_is_an_object_and_holds_no_key(tiny_model_path: Path, tmp_path: Path) -> None:
    lab, boss, wrong, query, in_file = SECRETS
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({lab: {"tenant": "lab", "requests_per_min": 3}}))
    flags = ("--log-format", "json", "--access-log", "--api-key-file", str(keys), "--admin-api-key", boss)
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, *flags) as server:
        url = f"{server.url}/v1/completions"

        def post(headers: dict[str, str], path: str = "") -> httpx.Response:
            return httpx.post(url + path, json=BODY, headers=headers, timeout=60)

        good = post({"Authorization": f"Bearer {lab}", "x-request-id": "mine-1"})
        assert good.status_code == 200
        assert post({"x-api-key": wrong, "x-request-id": "mine-2"}, f"?key={query}").status_code == 401
        assert post({"Authorization": f"Basic {wrong}"}).status_code == 401
        assert post({"Authorization": f"Bearer {lab}"}, "/nowhere").status_code == 404
        assert [post({"x-api-key": lab}).status_code for _ in range(2)] == [200, 429]
        assert httpx.get(f"{server.url}/metrics", headers={"x-api-key": boss}).status_code == 200
        odd = [(b"authorization", f"Bearer {lab}\u00ff".encode("latin-1"))]
        assert httpx.get(f"{server.url}/v1/models", headers=odd).status_code == 401
        keys.write_text(json.dumps({in_file: {"tenant": ""}}))
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: "the API keys stay" in server.log())
        keys.write_text(f'{{"{in_file}": ')
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: server.log().count("the API keys stay") == 2)
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        log = server.log()
    assert not [secret for secret in SECRETS if secret in log]
    lines = objects(log)
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    access = {line["request_id"]: line for line in lines if line["logger"] == "ropeway.access"}
    mine = access["mine-1"]
    assert (mine["method"], mine["path"], mine["status"]) == ("POST", "/v1/completions", 200)
    assert mine["answer_id"] == good.json()["id"] and mine["duration_ms"] > 0
    assert access["mine-2"]["status"] == 401 and access["mine-2"]["path"] == "/v1/completions"
    assert sorted({line["status"] for line in access.values()}) == [200, 401, 404, 429]


def test_a_problem_at_start_is_an_object_too() -> None:
    result = run_command("serve", "no-such-model", "--port", "0", "--log-format", "json")
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = objects(result.stderr)
    assert line["level"] == "critical" and "no-such-model" in line["message"]


@pytest.fixture
def json_log() -> Iterator[io.StringIO]:
    """What is logged meanwhile, as the server logs it."""
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    root.handlers = []
    begin_logging("json", stream)
    try:
        yield stream
    finally:
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook = hooks
        root.handlers, root.level = before, level
        logging.getLogger("uvicorn").setLevel(logging.NOTSET)


@pytest.mark.asyncio
async def test_a_failure_is_logged_with_its_request_and_told_to_nobody(json_log: io.StringIO) -> None:
    async def fails(request: Request) -> Response:
        raise ZeroDivisionError("the inside\nof it")

    async def breaks_off(request: Request) -> Response:
        def pieces() -> Iterator[bytes]:
            yield b"begun"
            raise ZeroDivisionError("the middle of it")

        return StreamingResponse(pieces())

    app = Starlette(routes=[Route("/fails", fails, methods=["POST"]), Route("/breaks-off", breaks_off)])
    app.add_middleware(FailureGuard)
    app.add_middleware(RequestIds, has_access_log=True, traffic=Traffic())
    transport = httpx.ASGITransport(app)
    headers = {"x-request-id": "mine-3", "Authorization": f"Bearer {SECRETS[0]}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
        answer = await http.post("/fails", json={"prompt": "a secret of mine"})
        with pytest.raises(ZeroDivisionError):  # what is begun cannot become an error: the connection is cut
            await http.get("/breaks-off")
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "inside" not in answer.text and answer.headers["x-request-id"] == "mine-3"
    lines = [line for line in objects(json_log.getvalue()) if line["logger"].startswith("ropeway.")]
    failure, access, cut = lines
    assert (failure["request_id"], failure["level"]) == ("mine-3", "error")
    assert "ZeroDivisionError: the inside\nof it" in failure["exception"]
    assert (access["path"], access["status"]) == ("/fails", 500) and cut["path"] == "/breaks-off"
    assert SECRETS[0] not in json_log.getvalue() and "a secret of mine" not in json_log.getvalue()


def test_what_python_itself_would_print_is_an_object(json_log: io.StringIO) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)

    def ends() -> None:
        raise ZeroDivisionError("in a thread")

    thread = threading.Thread(target=ends, name="weaver")
    thread.start()
    thread.join()
    try:
        raise ZeroDivisionError("at the end")
    except ZeroDivisionError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    warning, in_thread, at_end = objects(json_log.getvalue())
    assert "careful" in warning["message"] and warning["level"] == "warning"
    assert "weaver" in in_thread["message"] and "in a thread" in in_thread["exception"]
    assert "at the end" in at_end["exception"]
