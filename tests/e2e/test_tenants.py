"""Keys of a file over HTTP: who may do what, rates, reloading, and the isolation of tenants."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from tests.e2e.conftest import ENGINE_FLAGS
from tests.support.running_server import RunningServer, wait_until

KEYS: dict[str, dict[str, Any]] = {
    "sk-lab": {"tenant": "lab", "weight": 2.0},
    "sk-shop": {"tenant": "shop"},
    "sk-few": {"tenant": "few", "requests_per_min": 2},
    "sk-short": {"tenant": "short", "tokens_per_min": 30},
    "sk-leaving": {"tenant": "leaving"},
}
ADMIN = "sk-admin"
BODY = {"prompt": "x" * 40, "max_tokens": 4, "ignore_eos": True}


@dataclass
class Guarded:
    server: RunningServer
    key_file: Path

    def post(self, key: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.server.url}{path}", json={**BODY, **fields}, headers=headers, timeout=60)

    def get(self, key: str, path: str) -> httpx.Response:
        return httpx.get(f"{self.server.url}{path}", headers={"Authorization": f"Bearer {key}"}, timeout=60)


@pytest.fixture(scope="module")
def guarded(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    key_file = tmp_path_factory.mktemp("keys") / "keys.json"
    key_file.write_text(json.dumps(KEYS))
    flags = (*ENGINE_FLAGS, "--api-key-file", str(key_file), "--admin-api-key", ADMIN)
    with RunningServer(tiny_model_path, *flags) as running:
        yield Guarded(running, key_file)
        assert not [key for key in (*KEYS, ADMIN) if key in running.log()], "a secret was logged"


def test_every_path_but_health_is_guarded(guarded: Guarded) -> None:
    url = guarded.server.url
    for path in ("/health", "/ping"):
        assert httpx.get(url + path).status_code == 200, path
    paths = ("/", "/version", "/openapi.json", "/v1/models", "/v1", "/metrics", "/nowhere", "/health/", "//health")
    for path in paths:
        for headers in ({}, {"Authorization": "Bearer sk-nobody"}, {"x-api-key": "sk-nobody"}):
            answer = httpx.get(url + path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", (path, headers)
    assert httpx.post(f"{url}/v1/completions", content=b"not even JSON").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"x-api-key": "sk-lab"}).status_code == 200
    both = [("Authorization", "Bearer sk-lab"), ("Authorization", "Bearer sk-lab")]
    assert httpx.get(f"{url}/v1/models", headers=both).status_code == 401


def test_operating_the_server_needs_the_admin_key(guarded: Guarded) -> None:
    answer = guarded.get("sk-lab", "/metrics")
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "insufficient_permissions"
    assert guarded.get(ADMIN, "/metrics").status_code == 200
    assert guarded.get(ADMIN, "/v1/models").status_code == 200


def test_requests_per_minute(guarded: Guarded) -> None:
    assert [guarded.post("sk-few").status_code for _ in range(3)] == [200, 200, 429]
    refused = httpx.post(
        f"{guarded.server.url}/v1/completions", content=b"never parsed", headers={"Authorization": "Bearer sk-few"}
    )
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    with OpenAI(base_url=f"{guarded.server.url}/v1", api_key="sk-few", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="2 requests per minute"):
            client.completions.create(model="tiny", prompt="x")
        assert client.models.list().data  # reading costs nothing
    assert guarded.post("sk-shop").status_code == 200


def test_tokens_per_minute_count_prompts_and_answers(guarded: Guarded) -> None:
    usage = guarded.post("sk-short", prompt="x" * 20, max_tokens=60).json()["usage"]
    assert usage["total_tokens"] >= 80
    refused = guarded.post("sk-short")
    assert refused.status_code == 429 and "30 tokens per minute" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 80  # what was answered is paid for


def test_tenants_share_no_prefixes(guarded: Guarded) -> None:
    prompt = "a prompt that is long enough for several blocks of the cache, so that it could be found again"

    def num_cached(key: str) -> int:
        usage = guarded.post(key, prompt=prompt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert num_cached("sk-lab") == 0 and num_cached("sk-lab") > 0 and num_cached("sk-shop") == 0


def test_sighup_reads_the_file_again_and_a_bad_one_changes_nothing(guarded: Guarded) -> None:
    server = guarded.server
    guarded.key_file.write_text("{ this is no JSON, and names sk-leaving")
    server.send_signal(signal.SIGHUP)
    wait_until(lambda: "the API keys stay as they were" in server.log())
    assert guarded.get("sk-leaving", "/v1/models").status_code == 200
    changed = {key: terms for key, terms in KEYS.items() if key != "sk-leaving"}
    guarded.key_file.write_text(json.dumps({**changed, "sk-new": {"tenant": "new"}}))
    server.send_signal(signal.SIGHUP)
    wait_until(lambda: guarded.get("sk-new", "/v1/models").status_code == 200)
    assert guarded.get("sk-leaving", "/v1/models").status_code == 401
    assert guarded.post("sk-few").status_code == 429  # what it had used counts on
