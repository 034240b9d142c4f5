"""Sends fuzzed bodies to an application and judges the answers. Knows no model and writes no files.

Whatever was sent: no 5xx and no exception, an error in the shape of its endpoint, a whole answer or a stream with its
proper end, and afterwards every request at its end, every block free, no step failed, and no error in the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from support.asgi_client import Answer, AsgiClient
from support.fuzzing import Case

MOST_AT_ONCE = 48
ANSWER_TIMEOUT_S = 600.0
STREAM_ENDS = ("data: [DONE]", '"type":"message_stop"', '"type":"response.completed"', '"type":"response.incomplete"')
NO_CODE = "-"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a case. problem: what should not be; None where all is well."""

    case: Case
    status: int
    code: str
    problem: str | None


async def run_cases(client: AsgiClient, cases: Sequence[Case]) -> list[Verdict]:
    """Verdicts of some cases, sent many at once; those that concern the requests of others come last, one by one."""
    errors = _ErrorLog()
    logging.getLogger().addHandler(errors)
    try:
        waiting = iter([case for case in cases if not case.is_operation])
        verdicts: list[Verdict] = []

        async def work(each: Iterator[Case]) -> None:
            for case in each:
                verdicts.append(await _judged(client, case))

        await asyncio.gather(*(work(waiting) for _ in range(MOST_AT_ONCE)))
        for case in cases:
            if case.is_operation:
                verdicts.append(await _judged(client, case))
        await client.post("/resume", b"")
        await _wait_until_idle(client)
        assert not errors.lines, "\n".join(errors.lines[:5])
        await _check_quiet(client)
    finally:
        logging.getLogger().removeHandler(errors)
    return sorted(verdicts, key=lambda verdict: verdict.case.number)


async def _judged(client: AsgiClient, case: Case) -> Verdict:
    try:
        answer = await asyncio.wait_for(client.post(case.path, case.body, case.content_type), ANSWER_TIMEOUT_S)
    except Exception as error:  # a server would answer 500
        return Verdict(case, 500, type(error).__name__, repr(error)[:500])
    try:
        code, problem = _code_and_problem(case, answer)
    except (ValueError, KeyError, TypeError) as error:
        code, problem = NO_CODE, f"not the shape of an answer: {error!r}: {answer.body[:300]!r}"
    return Verdict(case, answer.status, code, problem)


def _code_and_problem(case: Case, answer: Answer) -> tuple[str, str | None]:
    if answer.headers["content-type"].startswith("text/event-stream"):
        return _stream_code_and_problem(answer)
    found = json.loads(answer.body)
    if answer.status < 300:
        return NO_CODE, None
    error = found["error"]
    code = error["type"] if case.path.startswith("/v1/messages") else error["code"]
    problem = None
    if answer.status >= 500:
        problem = "a 5xx"
    elif not error["message"] or "\n" in error["message"] or "Traceback" in error["message"]:
        problem = f"the message is {error['message'][:300]!r}"
    return code, problem


def _stream_code_and_problem(answer: Answer) -> tuple[str, str | None]:
    text = answer.body.decode()
    datas = [line[6:] for line in text.split("\n") if line.startswith("data: ")]  # U+2028 ends no event
    events: list[Any] = [json.loads(data) for data in datas if data != "[DONE]"]
    failed = [event for event in events if "error" in event or event.get("type") == "response.failed"]
    if failed:
        return "error in a stream", json.dumps(failed[0])[:500]
    last = text.rstrip().rsplit("\n", 1)[-1]
    return NO_CODE, None if any(end in last for end in STREAM_ENDS) else f"the stream ends in {last[:300]!r}"


async def _wait_until_idle(client: AsgiClient) -> None:
    """Until what runs in the background has ended too."""
    engine = client.llm.engine
    end_s = time.monotonic() + ANSWER_TIMEOUT_S
    while engine.num_open_requests:
        assert time.monotonic() < end_s, f"{engine.num_open_requests} requests do not end"
        await asyncio.sleep(0.01)


async def _check_quiet(client: AsgiClient) -> None:
    """Looks at what is left: nothing."""
    engine = client.llm.engine
    end_s = time.monotonic() + ANSWER_TIMEOUT_S
    while engine.stats.num_free_blocks != engine.stats.num_blocks:
        assert time.monotonic() < end_s, f"blocks are held by nobody: {engine.stats}"
        await asyncio.sleep(0.01)
    assert engine.stats.num_failed_steps == 0, f"{engine.stats.num_failed_steps} steps failed"
    assert (await client.get("/health")).status == 200


class _ErrorLog(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
