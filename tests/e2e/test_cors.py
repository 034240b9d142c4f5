"""Pages of other origins: kept out unless they are allowed, with keys and in errors too."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.e2e.conftest import ENGINE_FLAGS
from tests.support.running_server import RunningServer

from ropeway.errors import ConfigError
from ropeway.server.cors import CorsRules, listed

PAGE = {"Origin": "https://app.example"}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
BODY = {"prompt": "a", "max_tokens": 2}


def test_off_by_default(server: RunningServer) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, headers=PAGE)
    assert answer.status_code == 200
    preflight = httpx.options(f"{server.url}/v1/completions", headers={**PAGE, **PREFLIGHT})
    assert preflight.status_code == 405
    assert not [name for each in (answer, preflight) for name in each.headers if name.startswith("access-control")]


def test_allowed_origins_with_keys(tiny_model_path: Path) -> None:
    flags = ("--api-key", "s3cret", "--allowed-origins", '["https://app.example", "http://localhost:3000"]')
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, *flags, "--allow-credentials") as server:
        url = f"{server.url}/v1/completions"
        preflight = httpx.options(url, headers={**PAGE, **PREFLIGHT})  # a browser sends no key with it
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE["Origin"]
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        assert preflight.headers["access-control-allow-credentials"] == "true" and preflight.headers["x-request-id"]

        for key, status in ("s3cret", 200), ("wrong", 401):
            answer = httpx.post(url, json=BODY, headers={**PAGE, "Authorization": f"Bearer {key}"})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE["Origin"]
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        headers = {**PAGE, "Authorization": "Bearer s3cret"}
        with httpx.stream("POST", url, json={**BODY, "stream": True}, headers=headers) as stream:
            assert stream.headers["access-control-allow-origin"] == PAGE["Origin"] and b"[DONE]" in stream.read()

        stranger = httpx.options(url, headers={"Origin": "https://evil.example", **PREFLIGHT})
        assert stranger.status_code == 400 and "access-control-allow-origin" not in stranger.headers


def test_flags_in_both_forms() -> None:
    assert listed("--allowed-origins", ['["a", "b"]', "c", "a"]) == ("a", "b", "c")
    for wrong in ('["a"', "[1]", "[["):
        with pytest.raises(ConfigError, match="--allowed-origins"):
            listed("--allowed-origins", [wrong])


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://", "https://a.example/path", ""])
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        CorsRules(origins=(origin,))


def test_credentials_for_everybody_are_refused() -> None:
    with pytest.raises(ConfigError, match="--allow-credentials"):
        CorsRules(origins=("*",), allows_credentials=True)
