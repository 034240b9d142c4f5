"""`ropeway generate`: answers in a file, resumed where a run was cut off, refused where the question has changed."""

from __future__ import annotations

import json
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropeway.batch.journal import Journal
from ropeway.batch.journal_thread import JournalThread
from ropeway.batch.records import LineAnswer
from ropeway.cli import main

FLAGS = ["--max-num-batched-tokens", "64", "--num-kv-blocks", "64", "--max-tokens", "8"]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "one"},
    {"prompt": [5, 6, 7], "max_tokens": 3, "id": "second", "return_token_ids": True},
    {"messages": [{"role": "user", "content": "hi"}], "temperature": 1, "seed": 7, "n": 2},
    {"prompt": "four", "stop": "e", "temperature": 1},
    {"prompt": "", "id": "empty"},
    {"prompt": [5], "max_tokens": 100000},
    {"custom_id": "seventh", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "temperature": 1}},
    {"prompt": "x", "temprature": 1},
]

Run = Callable[..., int]


@pytest.fixture
def run(tiny_model_path: Path, tmp_path: Path) -> Run:
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(prompt) for prompt in PROMPTS) + "\n\n")

    def run(*flags: str) -> int:
        files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
        return main(["generate", "--model", str(tiny_model_path), *files, *FLAGS, *flags])

    return run


def answers(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """By id: the body of each response."""
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["response"]["body"] for line in lines}


def texts(tmp_path: Path) -> dict[str, Any]:
    """By id: texts and reasons, or the error."""
    return {
        name: body.get("error")
        or [(each.get("text") or each["message"]["content"], each["finish_reason"]) for each in body["choices"]]
        for name, body in answers(tmp_path).items()
    }


def test_every_line_is_answered_or_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 1
    stored = answers(tmp_path)
    assert list(stored) == ["1", "second", "3", "4", "empty", "6", "seventh", "8"]
    assert stored["1"]["usage"]["completion_tokens"] <= 8
    assert len(stored["second"]["choices"][0]["token_ids"]) <= 3
    assert len(stored["3"]["choices"]) == 2 and stored["3"]["object"] == "chat.completion"
    assert stored["seventh"]["usage"]["completion_tokens"] <= 8  # a flag that was given holds there too
    assert "empty" in stored["empty"]["error"]["message"] and stored["empty"]["error"]["param"] == "prompt"
    assert "100000" in stored["6"]["error"]["message"] and stored["8"]["error"]["param"] == "temprature"
    assert "3 of 8 lines were refused" in capsys.readouterr().err


def test_a_run_cut_off_goes_on_with_the_same_answers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_answer, num_put = Journal.put_answer, 0

    def put_three(journal: Journal, batch: int, number: int, answer: LineAnswer) -> None:
        nonlocal num_put
        if num_put == 3:
            raise sqlite3.OperationalError("cut off here")
        num_put += 1
        put_answer(journal, batch, number, answer)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "put_answer", put_three)
        patched.setattr(JournalThread, "MAX_GROUP", 1)
        assert run() == 1
    assert "cut off here" in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()
    assert run() == 1
    assert "3 of 8 lines are answered already" in capsys.readouterr().err
    found = texts(tmp_path)
    before = (tmp_path / "out.jsonl").read_bytes()
    assert run() == 1
    assert (tmp_path / "out.jsonl").read_bytes() == before
    (tmp_path / "out.jsonl").unlink()
    assert run() == 2 and "to start over" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out.jsonl.journal")
    assert run() == 1
    assert {**texts(tmp_path), "seventh": None} == {**found, "seventh": None}  # its seed is drawn


@pytest.mark.parametrize("change", ["line", "flag", "model"])
def test_a_changed_question_is_an_error(
    run: Run, tmp_path: Path, tiny_model_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    before = (tmp_path / "out.jsonl").read_bytes()
    flags = ["--temperature", "0.5"] if change == "flag" else []
    if change == "line":
        text = (tmp_path / "in.jsonl").read_text()
        (tmp_path / "in.jsonl").write_text(text.replace("one", "other"))
    if change == "model":
        other = tmp_path / "other.gguf"
        other.write_bytes(tiny_model_path.read_bytes())
        flags = ["--model", str(other)]
    capsys.readouterr()
    assert run(*flags) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "have changed since" in message
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_an_output_of_something_else_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("my diary\n")
    assert run() == 2
    assert (tmp_path / "out.jsonl").read_text() == "my diary\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 is not JSON"),
        ("5", "line 2 must be a JSON object"),
        ("{}", "either prompt or messages"),
        ('{"prompt": "x", "messages": []}', "either prompt or messages"),
        ('{"prompt": "x", "id": 1}', "custom_id '1' of line 1"),
        ('{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}', "POST"),
    ],
)
def test_a_wrong_input_line_is_named_before_anything_runs(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n' + line + "\n")
    assert run() == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_a_full_disk_is_one_line_and_leaves_whole_lines(run: Run, tiny_model_path: Path, tmp_path: Path) -> None:
    limit_bytes = 60_000  # the journal's tables fit, its answers do not

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert run() == 1
    whole = answers(tmp_path)
    (tmp_path / "out.jsonl").unlink()
    shutil.rmtree(tmp_path / "out.jsonl.journal")
    command = [sys.executable, "-m", "ropeway", "generate", "--model", str(tiny_model_path), *files, *FLAGS]
    result = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ropeway: error: the journal") and "disk full" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()
    assert run() == 1
    assert answers(tmp_path).keys() == whole.keys()


def test_an_output_that_is_no_file(tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", "/dev/full"]
    assert main(["generate", "--model", str(tiny_model_path), *files, *FLAGS]) == 2
    assert "not of an earlier run" in capsys.readouterr().err


def test_prompts_on_the_command_line(tiny_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(tiny_model_path), "a prompt", *FLAGS]) == 0
    assert capsys.readouterr().out.startswith("a prompt")
    assert main(["generate", "--model", str(tiny_model_path), "--chat", "a prompt", "another", *FLAGS]) == 0
    assert not capsys.readouterr().out.startswith("a prompt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--input FILE"),
        (["x", "--input", "f"], "one of them"),
        (["--input", "f"], "go together"),
        (["x", "--temperature", "-1"], "temperature"),
        (["x", "--top-p", "0"], "top_p"),
        (["--input", "no-such-file", "--output", "o"], "no-such-file"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
