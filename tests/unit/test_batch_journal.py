"""The journal of batches and what stands around it: lines, directory, groups of commits, output files."""

from __future__ import annotations

import io
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ropeway.batch.directory import BatchDirectory, NewFile
from ropeway.batch.journal import Journal
from ropeway.batch.journal_thread import JournalThread
from ropeway.batch.lines import MAX_FAULTS, LineLimits, LineSpec, read_lines
from ropeway.batch.output import result_line, write_results
from ropeway.batch.records import BatchRecord, FileRecord, LineAnswer, Page
from ropeway.errors import BatchStoreError, InvalidRequestError

ENDPOINT = "/v1/completions"
LIMITS = LineLimits(num_lines=10, line_bytes=200)


def line(custom_id: str, **fields: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {}, **fields})


def file_record(file_id: str, tenant: str = "a", **fields: Any) -> FileRecord:
    values: dict[str, Any] = {"filename": "x", "purpose": "batch", "num_bytes": 5, "created_s": 1, "expires_s": 100}
    return FileRecord(file_id=file_id, tenant=tenant, **{**values, **fields})


def batch_record(batch_id: str, tenant: str = "a", input_file_id: str = "file") -> BatchRecord:
    return BatchRecord(
        batch_id=batch_id,
        tenant=tenant,
        input_file_id=input_file_id,
        endpoint=ENDPOINT,
        model="m",
        metadata="null",
        status="validating",
        created_s=1,
        expires_s=1000,
        output_lifetime_s=50,
    )


def answer(text: str = "{}", status_code: int = 200) -> LineAnswer:
    return LineAnswer(
        status_code=status_code, request_id="r", body=text.encode(), num_prompt_tokens=3, num_output_tokens=2
    )


SPECS = [LineSpec(number, f"id {number}", 100 * number, 50) for number in range(1, 6)]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.sqlite")
    yield journal
    journal.close()


def test_lines_are_found_where_they_lie_whatever_the_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    content = f"\n{line('ä')}\r\n  \n{line('b')}".encode()
    path.write_bytes(content)
    specs, faults = read_lines(path, ENDPOINT, LIMITS)
    assert not faults and [(spec.number, spec.custom_id) for spec in specs] == [(2, "ä"), (4, "b")]
    for spec in specs:
        assert json.loads(content[spec.start : spec.start + spec.num_bytes])["custom_id"] == spec.custom_id


def test_long_lines_and_files_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"{line('a', body={'x': 'y' * 5000})}\n{line('b')}\n{'z' * (1 << 22)}\n{line('c')}\n")
    specs, faults = read_lines(path, ENDPOINT, LIMITS)
    assert [spec.number for spec in specs] == [2, 4] and [fault.line for fault in faults] == [1, 3]
    path.write_text("\n".join(line(f"{number}") for number in range(11)))
    assert read_lines(path, ENDPOINT, LIMITS)[1][0].code == "too_many_requests"
    path.write_text("\n".join("5" for _ in range(1000)))
    assert len(read_lines(path, ENDPOINT, LIMITS)[1]) == MAX_FAULTS
    assert read_lines(tmp_path / "none", ENDPOINT, LIMITS)[1][0].code == "file_not_found"


def test_a_line_has_one_answer_and_counts_once(journal: Journal) -> None:
    number = journal.add_batch(batch_record("b")).number
    journal.begin("b", SPECS, 2)
    journal.put_answer(number, 2, answer('"first"'))
    journal.put_answer(number, 2, answer('"second"', 500))
    journal.put_answer(number, 4, answer('"wrong"', 400))
    record = journal.batch("b")
    assert record is not None and record.status == "in_progress" and record.num_lines == 5
    assert (record.num_completed, record.num_failed) == (1, 1)
    assert (record.num_prompt_tokens, record.num_output_tokens) == (6, 4)
    assert [each.number for each in journal.pending_lines(number, 0, 10)] == [1, 3, 5]
    assert [each.number for each in journal.pending_lines(number, 1, 1)] == [3]
    assert [each and each.body for _, _, each in journal.results(number)] == [
        None, b'"first"', None, b'"wrong"', None,
    ]  # fmt: skip


def test_seeds_are_drawn_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    number = journal.add_batch(batch_record("b")).number
    journal.begin("b", SPECS, 2)
    seeds = [each.seed for each in journal.pending_lines(number, 0, 10)]
    journal.close()
    again = Journal(path)
    assert [each.seed for each in again.pending_lines(number, 0, 10)] == seeds and len(set(seeds)) == 5
    again.close()


def test_a_batch_that_is_cancelling_stays_so(journal: Journal) -> None:
    journal.add_batch(batch_record("b"))
    journal.set_status("b", "cancelling", 2)
    assert journal.begin("b", SPECS, 3).status == "cancelling"
    assert journal.set_status("b", "finalizing", 3, only_from="in_progress").status == "cancelling"
    assert [each.batch_id for each in journal.open_batches()] == ["b"]


def test_pages(journal: Journal) -> None:
    for number in range(6):
        journal.add_file(file_record(f"f{number}", tenant="ab"[number % 2], purpose=("batch", "other")[number == 4]))

    def ids(tenant: str | None, purpose: str | None = None, **page: Any) -> list[str]:
        return [each.file_id for each in journal.files(tenant, purpose, Page(**page))]

    assert ids("a") == ["f4", "f2", "f0"] and ids("b", limit=2) == ["f5", "f3"]
    assert ids("b", after="f3") == ["f1"] and ids("a", after="f3") == [] and ids(None, limit=1) == ["f5"]
    assert ids("a", is_ascending=True, after="f0") == ["f2", "f4"] and ids("a", "batch") == ["f2", "f0"]


def test_what_expired_is_forgotten_unless_an_open_batch_reads_it(journal: Journal) -> None:
    for name in ("file", "other", "young"):
        journal.add_file(file_record(name, expires_s=100 if name != "young" else 10_000))
    journal.add_batch(batch_record("open"))
    journal.add_batch(batch_record("over", input_file_id="other"))
    journal.fail("over", [], 5)
    assert journal.readers_of("file") == ["open"] and not journal.readers_of("other")
    assert journal.forget_expired(100, 1000) == ["other"] and journal.batch("over") is not None
    assert journal.forget_expired(1001, 1000) == [] and journal.batch("over") is None
    journal.end("open", "completed", (None, None), 9)
    assert journal.forget_expired(1002, 1000) == ["file"] and journal.num_stored() == (1, 5)


def test_output_is_in_order_and_says_why_lines_have_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    number = journal.add_batch(batch_record("b")).number
    journal.begin("b", SPECS, 2)
    for place in (3, 1):
        journal.put_answer(number, place, answer(json.dumps({"place": place})))
    journal.put_answer(number, 2, answer('{"error": {}}', 400))
    written = write_results(path, number, "cancelled", tmp_path / "out", tmp_path / "err")
    lines = [json.loads(each) for each in (tmp_path / "out").read_text().splitlines()]
    errors = [json.loads(each) for each in (tmp_path / "err").read_text().splitlines()]
    assert [each["response"]["body"]["place"] for each in lines] == [1, 3]
    assert [each["custom_id"] for each in errors] == ["id 2", "id 4", "id 5"]
    assert errors[0]["response"]["status_code"] == 400 and errors[1]["error"]["code"] == "batch_cancelled"
    assert written.output_bytes == (tmp_path / "out").stat().st_size
    write_results(path, number, "expired", tmp_path / "both", tmp_path / "both")
    both = [json.loads(each) for each in (tmp_path / "both").read_text().splitlines()]
    assert [each["custom_id"] for each in both] == [f"id {n}" for n in range(1, 6)]
    journal.end("b", "cancelled", (file_record("o"), None), 9)
    assert not list(journal.results(number)) and journal.file_ids() == {"o"}
    journal.close()


def test_a_line_of_output_is_one_line_for_every_reader() -> None:
    text = "\u2028 \u2029 \x85 \x1c \x0b \r \n ä"
    line = result_line(1, 2, text, answer(json.dumps({"text": text}, ensure_ascii=False)), "completed").decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["custom_id"] == json.loads(line)["response"]["body"]["text"] == text


def test_a_file_that_was_cut_off_is_not_there_and_its_rest_is_removed(tmp_path: Path) -> None:
    directory = BatchDirectory(tmp_path / "b")
    directory.open()
    assert directory.store("whole", io.BytesIO(b"content")) == 7
    with pytest.raises(RuntimeError), NewFile(directory.file_path("cut")) as file:
        file.content.write(b"some")
        raise RuntimeError
    directory.file_path("orphan").write_bytes(b"x")
    directory.file_path("late.part").write_bytes(b"x")
    directory.remove_others({"whole"})
    assert [path.name for path in (tmp_path / "b" / "files").iterdir()] == ["whole"]
    with pytest.raises(BatchStoreError, match="a place of its own"):
        BatchDirectory(tmp_path / "b").open()
    directory.close()
    directory.open()
    directory.close()


def test_a_journal_of_another_version_or_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("my diary, which is longer than the header of a database would be, so it is read")
    with pytest.raises(BatchStoreError, match="cannot be used"):
        Journal(tmp_path / "text")
    connection = sqlite3.connect(tmp_path / "newer")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(BatchStoreError, match="version 99"):
        Journal(tmp_path / "newer")


def test_what_comes_while_a_commit_is_written_is_committed_together(tmp_path: Path) -> None:
    thread = JournalThread(Journal(tmp_path / "journal.sqlite"))
    gate = threading.Event()
    first = thread.submit(lambda journal: gate.wait(10))
    rest = [thread.submit(lambda journal, n=n: journal.add_file(file_record(f"f{n}"))) for n in range(50)]

    def refuse(journal: Journal) -> None:
        raise InvalidRequestError("no")

    refused = thread.submit(refuse)
    gate.set()
    assert first.result(10) and all(each.result(10) is None for each in rest)
    with pytest.raises(InvalidRequestError, match="no"):
        refused.result(10)
    assert thread.num_commits <= 3 and thread.num_operations == 52
    assert thread.submit(lambda journal: journal.num_stored()[0]).result(10) == 50
    thread.close()
    with pytest.raises(BatchStoreError, match="closed"):
        thread.submit(refuse)


def test_an_operation_that_fails_harms_no_other_of_its_group(tmp_path: Path) -> None:
    thread = JournalThread(Journal(tmp_path / "journal.sqlite"))
    gate = threading.Event()
    thread.submit(lambda journal: gate.wait(10))
    good = thread.submit(lambda journal: journal.add_file(file_record("f")))

    def fail(journal: Journal) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    bad = thread.submit(fail)
    gate.set()
    with pytest.raises(BatchStoreError, match="disk full"):
        bad.result(10)
    assert good.result(10) is None and thread.submit(lambda journal: journal.num_stored()).result(10) == (1, 5)
    thread.close()
