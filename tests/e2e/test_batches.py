"""Files and batches with the real `openai` client: results, errors, progress, cancelling, lists, tenants, limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch, FileObject
from tests.e2e.conftest import ENGINE_FLAGS
from tests.support.running_server import RunningServer, wait_until

KEYS = {"sk-lab": {"tenant": "lab", "weight": 2.0, "tokens_per_min": 10**6}, "sk-shop": {"tenant": "shop"}}
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(scope="module")
def running(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    home = tmp_path_factory.mktemp("batches")
    (home / "keys.json").write_text(json.dumps(KEYS))
    flags = ("--api-key-file", str(home / "keys.json"), "--admin-api-key", "sk-admin", "--batch-dir", str(home / "b"))
    limits = ("--max-batch-file-size", "64K", "--max-body-size", "4K", "--served-model-name", "tiny")
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, *flags, *limits) as server:
        yield server


def client_of(server: RunningServer, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def lab(running: RunningServer) -> Iterator[OpenAI]:
    with client_of(running, "sk-lab") as client:
        yield client


def chat_line(custom_id: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 6, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(client: OpenAI, lines: list[Any], **options: Any) -> FileObject:
    content = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return client.files.create(file=("in.jsonl", content.encode()), purpose="batch", **options)


def begin(client: OpenAI, lines: list[Any], endpoint: Any = CHAT, **options: Any) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, lines).id, endpoint=endpoint, completion_window="24h", **options
    )


def ended(client: OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED, 60)
    return client.batches.retrieve(batch.id)


def results(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_answers_its_lines_in_order_as_requests_would_be(lab: OpenAI) -> None:
    lines = [chat_line(f"line {number}", temperature=0) for number in range(20)]
    batch = begin(lab, lines, metadata={"for": "a test"})
    assert batch.status == "validating" and batch.object == "batch" and batch.metadata == {"for": "a test"}
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = ended(lab, batch)
    assert done.status == "completed" and done.errors is None and done.error_file_id is None
    assert done.request_counts is not None and done.request_counts.model_dump() == {
        "total": 20, "completed": 20, "failed": 0,
    }  # fmt: skip
    times = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
    assert list(times) == sorted(times)  # type: ignore[type-var]
    stored = results(lab, done.output_file_id)
    assert [each["custom_id"] for each in stored] == [line["custom_id"] for line in lines]
    assert len({each["id"] for each in stored}) == 20
    total = 0
    for line, each in zip(lines, stored, strict=True):
        assert each["error"] is None and each["response"]["status_code"] == 200
        body = each["response"]["body"]
        assert each["response"]["request_id"] == body["id"] and body["object"] == "chat.completion"
        total += body["usage"]["total_tokens"]
        if line in lines[:3]:
            direct = lab.chat.completions.create(**line["body"])
            assert body["choices"][0]["message"]["content"] == direct.choices[0].message.content
    assert done.usage is not None and done.usage.total_tokens == total


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": ["x", "x"], "max_tokens": 8, "temperature": 1, "return_token_ids": True}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 8}),
    ],
)
def test_other_endpoints(lab: OpenAI, url: str, body: dict[str, Any]) -> None:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    done = ended(lab, begin(lab, [line], endpoint=url))
    (each,) = results(lab, done.output_file_id)
    answer = each["response"]["body"]
    if url == "/v1/completions":
        first, second = (choice["token_ids"] for choice in answer["choices"])
        assert len(first) == 8 and first != second  # prompts of one line draw numbers of their own
    else:
        assert answer["object"] == "response" and answer["store"] is False
        with pytest.raises(openai.NotFoundError):
            lab.responses.retrieve(answer["id"])


def test_what_is_wrong_with_a_body_is_the_error_of_its_line_as_over_http(lab: OpenAI, running: RunningServer) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "unknown field": {"temprature": 1},
        "out of range": {"temperature": -1},
        "too long": {"max_tokens": 10**6},
        "model": {"model": "another"},
        "audio": {"audio": {"voice": "x"}},
        "streamed": {"stream": True},
    }
    lines = [chat_line(name, **fields) for name, fields in wrong.items()] + [chat_line("right")]
    done = ended(lab, begin(lab, lines))
    assert done.status == "completed" and done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, len(wrong))
    assert [each["custom_id"] for each in results(lab, done.output_file_id)] == ["right"]
    errors = {each["custom_id"]: each["response"] for each in results(lab, done.error_file_id)}
    assert errors.keys() == wrong.keys()
    for line in lines[: len(wrong) - 1]:
        headers = {"Authorization": "Bearer sk-lab"}
        direct = httpx.post(f"{running.url}{CHAT}", json=line["body"], headers=headers, timeout=60)
        told = errors[line["custom_id"]]
        assert (told["status_code"], told["body"]) == (direct.status_code, direct.json()), line
    assert errors["streamed"]["status_code"] == 400 and errors["streamed"]["body"]["error"]["param"] == "stream"


@pytest.mark.parametrize(
    ("lines", "number", "message"),
    [
        ([chat_line("a"), chat_line("b"), chat_line("a")], 3, "custom_id 'a' of line 1"),
        ([chat_line("a"), "", "{"], 3, "not JSON"),
        (["5"], 1, "JSON object"),
        ([chat_line("a") | {"custom_id": 7}], 1, "custom_id"),
        ([chat_line("")], 1, "custom_id"),
        ([chat_line("a") | {"method": "GET"}], 1, "POST"),
        ([chat_line("a", url="/v1/completions")], 1, "/v1/completions"),
        ([chat_line("a") | {"body": []}], 1, "body"),
        ([chat_line("a") | {"extra": 1}], 1, "extra"),
        ([chat_line("a", user="x" * 5000)], 1, "longer than 4096 bytes"),
        ([""], None, "no requests"),
    ],
)
def test_a_wrong_file_fails_the_batch_and_names_the_line(
    lab: OpenAI, lines: list[Any], number: int | None, message: str
) -> None:
    done = ended(lab, begin(lab, lines))
    assert done.status == "failed" and done.failed_at is not None and done.output_file_id is None
    assert done.errors is not None and done.errors.data is not None
    assert done.errors.data[0].line == number and message in (done.errors.data[0].message or "")


def test_cancelling_keeps_what_was_answered(lab: OpenAI) -> None:
    long = {"max_tokens": 400, "ignore_eos": True}
    # the pool holds them all: lines set out in no certain order, and the short one must not wait for memory
    batch = begin(lab, [chat_line("short", max_tokens=1), *[chat_line(f"long {n}", **long) for n in range(10)]])

    def num_completed() -> int:
        counts = lab.batches.retrieve(batch.id).request_counts
        return 0 if counts is None else counts.completed

    wait_until(lambda: num_completed() == 1, 30)  # progress can be seen
    assert lab.batches.cancel(batch.id).status == "cancelling"
    done = ended(lab, batch)
    assert done.status == "cancelled" and done.cancelled_at is not None and done.cancelling_at is not None
    answered = [each["custom_id"] for each in results(lab, done.output_file_id)]
    rest = results(lab, done.error_file_id)
    assert "short" in answered and len(answered) + len(rest) == 11
    assert all(each["response"] is None and each["error"]["code"] == "batch_cancelled" for each in rest) and rest
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        lab.batches.cancel(batch.id)


def test_files_can_be_listed_read_and_deleted(lab: OpenAI) -> None:
    content = json.dumps(chat_line("ä")).encode() + b"\n"
    created = lab.files.create(file=("näme.jsonl", content), purpose="batch")
    assert created.purpose == "batch" and created.bytes == len(content) and created.status == "processed"
    assert created.expires_at == created.created_at + 30 * 24 * 3600
    assert lab.files.retrieve(created.id) == created and lab.files.content(created.id).content == content
    brief = upload(lab, [chat_line("x")], expires_after={"anchor": "created_at", "seconds": 3600})
    assert brief.expires_at == brief.created_at + 3600
    assert [each.id for each in lab.files.list(limit=2)][:2] == [brief.id, created.id]
    assert [each.id for each in lab.files.list(after=brief.id, limit=1).data] == [created.id]
    assert lab.files.list(order="asc").data[-1].id == brief.id
    assert not [each for each in lab.files.list(purpose="batch_output") if each.id in (created.id, brief.id)]
    assert lab.files.delete(created.id).deleted
    for ask in (lab.files.retrieve, lab.files.content, lab.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(created.id)
    with pytest.raises(openai.NotFoundError):
        lab.batches.create(input_file_id=created.id, endpoint=CHAT, completion_window="24h")


def test_a_file_that_is_read_stays_until_its_batch_has_ended(lab: OpenAI) -> None:
    batch = begin(lab, [chat_line(f"{n}", max_tokens=400, ignore_eos=True) for n in range(20)])
    with pytest.raises(openai.BadRequestError, match=batch.id):
        lab.files.delete(batch.input_file_id)
    lab.batches.cancel(batch.id)
    ended(lab, batch)
    assert lab.files.delete(batch.input_file_id).deleted


def test_batches_are_listed_newest_first_in_pages(lab: OpenAI) -> None:
    ids = [ended(lab, begin(lab, [chat_line("a", max_tokens=1)])).id for _ in range(3)]
    page = lab.batches.list(limit=2)
    assert [each.id for each in page.data] == ids[:0:-1] and page.has_more
    assert [each.id for each in lab.batches.list(limit=2, after=ids[1]).data][0] == ids[0]
    assert [each.id for each, _ in zip(lab.batches.list(limit=1), range(3), strict=False)] == ids[::-1]
    assert not lab.batches.list(after="batch_nothing").data


def test_tenants_see_their_own_only(lab: OpenAI, running: RunningServer) -> None:
    done = ended(lab, begin(lab, [chat_line("a", max_tokens=1)]))
    with client_of(running, "sk-shop") as shop, client_of(running, "sk-admin") as admin:
        for file_id in (done.input_file_id, done.output_file_id or ""):
            for ask in (shop.files.retrieve, shop.files.content, shop.files.delete):
                with pytest.raises(openai.NotFoundError):
                    ask(file_id)
        for see in (shop.batches.retrieve, shop.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                see(done.id)
        with pytest.raises(openai.NotFoundError):
            shop.batches.create(input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h")
        assert not shop.files.list().data and not shop.batches.list().data
        own = ended(shop, begin(shop, [chat_line("a", max_tokens=1)]))
        assert own.status == "completed" and [each.id for each in shop.batches.list()] == [own.id]
        assert {done.id, own.id} <= {each.id for each in admin.batches.list(limit=2)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"x" * 65: "y"}}, "metadata"),
        ({"metadata": {"x": 5}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after"),
        ({"nonsense": 1}, "nonsense"),
        ({"input_file_id": None}, "input_file_id"),
    ],
)
def test_wrong_batches_name_the_field(running: RunningServer, fields: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **fields}
    headers = {"Authorization": "Bearer sk-lab"}
    answer = httpx.post(f"{running.url}/v1/batches", json=body, headers=headers, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    ("request_options", "status"),
    [
        ({"files": {"file": b"{}"}, "data": {"purpose": "fine-tune"}}, 400),
        ({"files": {"file": b"{}"}}, 400),
        ({"files": {"other": b"{}"}, "data": {"purpose": "batch"}}, 400),
        ({"files": {"file": b"{}", "more": b"{}"}, "data": {"purpose": "batch"}}, 400),
        ({"files": {"file": b"{}"}, "data": {"purpose": "batch", "expires_after[seconds]": "3600"}}, 400),
        ({"files": {"file": b"{}"}, "data": {"purpose": "batch", "nonsense": "1"}}, 400),
        ({"files": {"file": b"x" * (65 << 10)}, "data": {"purpose": "batch"}}, 413),
        ({"files": {"file": b"x" * (600 << 10)}, "data": {"purpose": "batch"}}, 413),
        ({"json": {"purpose": "batch"}}, 400),
        ({"content": b"--x\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
        ({"content": b"--x--", "headers": {"content-type": "multipart/form-data"}}, 400),
        ({"content": b"", "headers": {"content-type": "multipart/form-data; boundary=x"}}, 400),
    ],
)
def test_wrong_uploads_are_refused(running: RunningServer, request_options: dict[str, Any], status: int) -> None:
    headers = {"Authorization": "Bearer sk-lab", **request_options.pop("headers", {})}
    answer = httpx.post(f"{running.url}/v1/files", headers=headers, timeout=60, **request_options)
    assert answer.status_code == status and answer.json()["error"]["message"], answer.text
    assert not (Path(running.flag("--batch-dir")) / "files").joinpath("x").exists()


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=10001", "order=up"])
def test_wrong_pages_are_refused(running: RunningServer, query: str) -> None:
    answer = httpx.get(f"{running.url}/v1/files?{query}", headers={"Authorization": "Bearer sk-lab"})
    assert answer.status_code == 400


def test_without_a_place_they_are_refused_and_the_rest_is_served(tiny_model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--batch-dir", str(tmp_path / "file" / "b")) as server:
        assert "/v1/files and /v1/batches are refused" in server.log() and "--batch-dir" in server.log()
        for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x"):
            answer = httpx.get(f"{server.url}{path}")
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "batches_unavailable", path
        assert httpx.get(f"{server.url}/ready").status_code == 200
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, "--no-batches") as server:
        assert "--batch-dir" in httpx.get(f"{server.url}/v1/files").json()["error"]["message"]


def test_a_directory_is_for_one_server_at_a_time(tiny_model_path: Path, tmp_path: Path) -> None:
    flags = (*ENGINE_FLAGS, "--batch-dir", str(tmp_path / "b"))
    with RunningServer(tiny_model_path, *flags) as first, RunningServer(tiny_model_path, *flags) as second:
        assert httpx.get(f"{first.url}/v1/files").status_code == 200
        refused = httpx.get(f"{second.url}/v1/files")
        assert refused.status_code == 503 and "another server" in refused.json()["error"]["message"]
        first.process.kill()
        first.process.wait()
        wait_until(lambda: httpx.get(f"{second.url}/v1/files").status_code == 200)
