"""Pausing, aborting, asking after requests, tokens, pings, request ids and the documentation, over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from tests.e2e.conftest import ENGINE_FLAGS
from tests.support.running_server import RunningServer, wait_until

from ropeway.llm import AsyncLLM
from ropeway.server.app import create_app
from ropeway.server.config import ServerConfig
from ropeway.server.tenants import KeyRing
from ropeway.server.traffic import Traffic

KEYS = {"sk-a": {"tenant": "a"}, "sk-b": {"tenant": "b"}}
BODY = {"prompt": "go on", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
ENDLESS = {**BODY, "max_tokens": 400, "n": 8}
LONG = {**BODY, "max_tokens": 150, "n": 2}


class Asking(threading.Thread):
    """One request on a thread of its own; `answer` once it has ended."""

    def __init__(self, url: str, body: dict[str, Any], request_id: str, key: str = "sk-a") -> None:
        super().__init__()
        self.answer = httpx.Response(0)
        headers = {"x-request-id": request_id, "x-api-key": key}
        self._call = {"url": f"{url}/v1/completions", "json": body, "headers": headers, "timeout": 60}
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(**self._call)


@pytest.fixture(scope="module")
def shared(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    key_file = tmp_path_factory.mktemp("keys") / "keys.json"
    key_file.write_text(json.dumps(KEYS))
    flags = ("--api-key-file", str(key_file), "--admin-api-key", "sk-admin", "--ping-interval", "0.05", "--access-log")
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, *flags) as running:
        yield running


@pytest.fixture
def boss(shared: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, headers=shared.admin_headers, timeout=60) as client:
        yield client
        client.post("/resume")


@pytest.fixture
def caller(shared: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared.url, headers={"x-api-key": "sk-a"}, timeout=60) as client:
        yield client


def state_of(client: httpx.Client, name: str) -> str:
    answer = client.get(f"/v1/requests/{name}")
    return str(answer.json()["state"]) if answer.status_code == 200 else "unknown"


def test_a_pause_holds_everything_and_a_resume_lets_it_go(
    shared: RunningServer, boss: httpx.Client, caller: httpx.Client
) -> None:
    whole = caller.post("/v1/completions", json=LONG).json()["choices"]
    running = Asking(shared.url, LONG, "run-1")
    wait_until(lambda: caller.get("/v1/requests/run-1").json().get("usage", {}).get("completion_tokens", 0) > 0)
    assert boss.post("/pause").json() == {"status": "paused"}
    assert boss.get("/health").status_code == 200
    assert boss.get("/ready").status_code == 503 and httpx.get(f"{shared.url}/ready").status_code == 503
    wait_until(lambda: state_of(caller, "run-1") == "running")
    frozen = [caller.get("/v1/requests/run-1").json()["usage"]["completion_tokens"] for _ in range(3)]
    waiting = Asking(shared.url, BODY, "wait-1")
    wait_until(lambda: state_of(caller, "wait-1") == "waiting")
    held = caller.get("/v1/requests/wait-1").json()
    assert held["waiting_reason"] == "paused" and held["usage"]["completion_tokens"] == 0
    late = caller.post("/v1/completions", json={**BODY, "queue_timeout": 0.05})
    assert late.status_code == 503 and late.json()["error"]["code"] == "overloaded"
    assert caller.get("/v1/requests/run-1").json()["usage"]["completion_tokens"] == frozen[-1]
    assert waiting.is_alive() and running.is_alive()
    assert boss.post("/resume").json() == {"status": "resumed"} and boss.get("/ready").status_code == 200
    running.join(60)
    waiting.join(60)
    assert running.answer.json()["choices"] == whole and waiting.answer.status_code == 200
    done = caller.get("/v1/requests/run-1").json()
    assert done["state"] == "finished" and done["finish_reasons"] == ["length"] * 2 and done["waiting_reason"] is None
    assert done["usage"] == running.answer.json()["usage"]
    assert caller.get(f"/v1/requests/{running.answer.json()['id']}").json() == done


def test_aborting_by_either_id_and_asking_after_it(
    shared: RunningServer, boss: httpx.Client, caller: httpx.Client
) -> None:
    first = Asking(shared.url, ENDLESS, "abort-1")
    wait_until(lambda: state_of(caller, "abort-1") == "running")
    answer_id = caller.get("/v1/requests/abort-1").json()["id"]
    assert boss.post("/abort_requests", json={"request_ids": [answer_id, "nobody's"]}).json()["aborted"] == [answer_id]
    first.join(60)
    assert {choice["finish_reason"] for choice in first.answer.json()["choices"]} == {"abort"}
    ended = caller.get("/v1/requests/abort-1").json()
    assert ended["state"] == "aborted" and ended["usage"] == first.answer.json()["usage"]
    assert boss.post("/abort_requests", json={"request_ids": answer_id}).json()["aborted"] == []
    others = [Asking(shared.url, ENDLESS, f"abort-{key}", key) for key in KEYS]
    wait_until(lambda: shared.metric("num_requests_running") == 16)
    assert len(boss.post("/abort_requests", json={"abort_all": True}).json()["aborted"]) == 2
    for other in others:
        other.join(60)
    wait_until(lambda: shared.metric("kv_cache_usage_perc") == 0)
    for wrong in ({}, {"abort_all": True, "request_ids": []}, {"request_ids": 3}):
        assert boss.post("/abort_requests", json=wrong).status_code == 400


def test_a_request_is_seen_by_its_tenant_only(shared: RunningServer, boss: httpx.Client, caller: httpx.Client) -> None:
    answer_id = caller.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"}).json()["id"]
    for name in (answer_id, "mine"):
        assert caller.get(f"/v1/requests/{name}").json()["id"] == answer_id
        assert boss.get(f"/v1/requests/{name}").json()["id"] == answer_id
        stranger = httpx.get(f"{shared.url}/v1/requests/{name}", headers={"x-api-key": "sk-b"})
        nowhere = httpx.get(f"{shared.url}/v1/requests/nowhere", headers={"x-api-key": "sk-b"})
        assert stranger.status_code == nowhere.status_code == 404
        assert stranger.json()["error"]["message"].replace(name, "nowhere") == nowhere.json()["error"]["message"]
    failed = caller.post("/v1/completions", json={**ENDLESS, "timeout": 0.05}, headers={"x-request-id": "slow"})
    assert failed.status_code == 504
    wait_until(lambda: state_of(caller, "slow") == "failed")
    assert "its timeout is 0.05 s" in caller.get("/v1/requests/slow").json()["error"]


def test_a_stream_is_pinged_until_its_first_token(
    shared: RunningServer, boss: httpx.Client, caller: httpx.Client
) -> None:
    boss.post("/pause")
    lines: list[str] = []
    with caller.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 100, "stream": True}) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if lines.count(": ping") == 3:
                boss.post("/resume")
    first = next(number for number, line in enumerate(lines) if line.startswith("data: "))
    assert ": ping" not in lines[first:] and set(lines[:first]) == {": ping", ""}
    assert lines[-2] == "data: [DONE]"


def test_request_ids_come_back_and_are_logged(shared: RunningServer, caller: httpx.Client) -> None:
    answer = caller.post("/v1/completions", json=BODY, headers={"x-request-id": "visible-1"})
    assert answer.headers["x-request-id"] == "visible-1"
    line = "[visible-1]: POST /v1/completions 200 "
    wait_until(lambda: line in shared.log())
    assert answer.json()["id"] in next(each for each in shared.log().splitlines() if line in each)
    drawn = {caller.get("/v1/models", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "x" * 129)}
    assert len(drawn) == 2 and all(len(each) == 32 for each in drawn)
    refused = httpx.get(f"{shared.url}/v1/models", headers={"x-request-id": "no-key"})
    assert refused.status_code == 401 and refused.headers["x-request-id"] == "no-key"


def test_a_redirect_keeps_the_scheme_that_a_proxy_was_asked_by(caller: httpx.Client) -> None:
    # Without it a client would send its key and prompt again in the clear.
    answer = caller.post("/v1/completions/", json={"prompt": "a"}, headers={"X-Forwarded-Proto": "https"})
    assert answer.status_code == 307
    assert answer.headers["location"].startswith("https://") and answer.headers["location"].endswith("/v1/completions")


def test_what_clients_that_build_prompts_are_told(caller: httpx.Client) -> None:
    info = caller.get("/tokenizer_info").json()
    for name in ("bos_token", "eos_token"):
        asked = {"prompt": info[name], "add_special_tokens": False}
        assert len(caller.post("/tokenize", json=asked).json()["tokens"]) == 1
    assert "<|im_start|>" in info["chat_template"]


def test_tokens_and_back(caller: httpx.Client) -> None:
    text = "A ropeway: grüße, 🚡"
    whole = caller.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert whole["count"] == len(whole["tokens"]) == len(whole["token_strs"]) and whole["max_model_len"] == 512
    plain = caller.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert caller.post("/detokenize", json={"tokens": plain}).json() == {"prompt": text}
    assert plain == whole["tokens"][-len(plain) :] and "token_strs" in whole
    usage = caller.post("/v1/completions", json={**BODY, "prompt": text}).json()["usage"]
    assert usage["prompt_tokens"] == whole["count"]
    messages = [{"role": "user", "content": text}]
    chat = caller.post("/tokenize", json={"messages": messages}).json()
    asked = caller.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert asked["usage"]["prompt_tokens"] == chat["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}, None),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, None),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_wrong_bodies_name_the_field(caller: httpx.Client, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = caller.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == (param or next(name for name in body if name.startswith("add")))


def test_the_page_shows_the_whole_document_and_loads_nothing(caller: httpx.Client) -> None:
    document = caller.get("/openapi.json").json()
    page = caller.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page.text
    for schema in document["components"]["schemas"].values():
        for name in schema["properties"] if schema.get("title", "").endswith("Body") else ():
            assert f"<code>{name}</code>" in page.text, name
    assert "<script" not in page.text and "src=" not in page.text and "http" not in page.text


def test_the_document_has_every_route_and_no_other(tiny_model_path: Path, boss: httpx.Client) -> None:
    llm = AsyncLLM(tiny_model_path, backend="reference", num_kv_blocks=8)
    routes = [
        route for route in create_app(llm, ServerConfig(), KeyRing({}), Traffic()).routes if isinstance(route, Route)
    ]
    served = {
        (route.path.replace(":path}", "}"), method.lower())
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    paths = boss.get("/openapi.json").json()["paths"]
    assert served == {(path, method) for path, methods in paths.items() for method in methods}


def test_every_path_of_the_document_exists(caller: httpx.Client, boss: httpx.Client) -> None:
    paths = boss.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            answer = boss.request(method, path.replace("{model_id}", "x").replace("{request_id}", "x"), content=b"")
            assert answer.status_code not in (404, 405) or "{" in path, path
