"""Batches across servers: told to stop, killed, of another model; and the command line."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.conftest import ENGINE_FLAGS
from tests.support.running_server import RunningServer, wait_until

from ropeway.cli import main

LINES = [
    {
        "custom_id": f"line {number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"{number}", "max_tokens": 60, "ignore_eos": True, "temperature": 1},
    }
    for number in range(30)
]


@pytest.fixture
def lines_path(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def num_answered(url: str, batch_id: str) -> int:
    counts = httpx.get(f"{url}/v1/batches/{batch_id}").json()["request_counts"]
    return int(counts["completed"] + counts["failed"])


def test_what_is_in_flight_at_sigterm_is_pending_again_and_another_model_leaves_it_alone(
    tiny_model_path: Path, tmp_path: Path, lines_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*ENGINE_FLAGS, "--max-num-seqs", "4", "--batch-dir", str(tmp_path / "b"))
    with RunningServer(tiny_model_path, *flags) as server:
        assert main(["batch", "submit", str(lines_path), "--url", server.url]) == 0
        batch_id = capsys.readouterr().out.strip()
        assert main(["batch", "fetch", batch_id, "--url", server.url]) == 1
        assert "fetch it when it has ended" in capsys.readouterr().err
        wait_until(lambda: num_answered(server.url, batch_id) > 0, 30)
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    with RunningServer(tiny_model_path, *flags, "--served-model-name", "another") as server:
        assert f"batch {batch_id} waits for a server of the model tiny" in server.log()
        before = num_answered(server.url, batch_id)
        assert 0 < before < len(LINES)
        assert httpx.get(f"{server.url}/v1/batches/{batch_id}").json()["status"] == "in_progress"
    with RunningServer(tiny_model_path, *flags) as server:
        wait_until(lambda: num_answered(server.url, batch_id) == len(LINES), 60)
        wait_until(lambda: main(["batch", "fetch", batch_id, "-o", str(tmp_path / "o"), "--url", server.url]) == 0, 30)
        answers = [json.loads(line) for line in (tmp_path / "o").read_text().splitlines()]
        assert [each["custom_id"] for each in answers] == [line["custom_id"] for line in LINES]


def test_the_command_line(
    tiny_model_path: Path, tmp_path: Path, lines_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    flags = (*ENGINE_FLAGS, "--batch-dir", str(tmp_path / "b"), "--api-key", "sk-x")
    with RunningServer(tiny_model_path, *flags) as server:
        at = ["--url", f"{server.url}/v1"]

        def run(*arguments: str) -> tuple[int, str, str]:
            code = main(["batch", *arguments, *at])
            out, err = capsys.readouterr()
            return code, out, err

        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        assert run("status", "batch_x") == (1, "", f"ropeway: error: {server.url} refused: the API key is missing or "
            "wrong; send it as Authorization: Bearer KEY or as x-api-key: KEY (401)\n")  # fmt: skip
        monkeypatch.setenv("ROPEWAY_API_KEY", "sk-x")
        code, out, err = run("submit", str(lines_path), "--wait")
        assert code == 0 and "30 of 30 lines answered" in err
        batch_id = out.strip()
        status: dict[str, Any] = json.loads(run("status", batch_id)[1])
        assert status["id"] == batch_id and status["status"] == "completed"
        assert len(run("fetch", batch_id)[1].splitlines()) == 30
        assert run("cancel", batch_id)[0] == 1

        wrong = LINES[0] | {"custom_id": "wrong", "body": {"prompt": "x", "temperature": -1}}
        lines_path.write_text("".join(json.dumps(line) + "\n" for line in [LINES[0], wrong]))
        code, out, err = run("submit", str(lines_path), "--wait", "--endpoint", "/v1/completions")
        assert code == 1 and "1 of 2 lines answered" in err
        assert run("fetch", out.strip(), "--errors", str(tmp_path / "e"))[0] == 1
        assert json.loads((tmp_path / "e").read_text())["custom_id"] == "wrong"
        code, out, err = run("submit", str(lines_path), "--wait", "--endpoint", "/v1/chat/completions")
        assert code == 1 and "is failed" in err and "line 1" in err
        (tmp_path / "none").write_text("\n")
        assert run("submit", str(tmp_path / "none"))[0] == 2
    assert run("status", batch_id)[2].startswith(f"ropeway: error: {server.url} cannot be reached")
    assert main(["batch", "status", "x", "--url", "nowhere"]) == 2
    assert "not an HTTP address" in capsys.readouterr().err
