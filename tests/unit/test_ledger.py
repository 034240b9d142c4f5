"""The soak's ledger finds what a server counted twice, not at all, or in the wrong class."""

from __future__ import annotations

from harness.ledger import Ledger

METRICS = """\
# HELP ropeway:http_requests_total HTTP requests that have ended.
ropeway:http_requests_total{method="POST",model_name="m",path="/v1/completions",status="200"} 3.0
ropeway:http_requests_total{method="POST",model_name="m",path="/v1/completions",status="499"} 1.0
ropeway:http_requests_total{method="GET",model_name="m",path="/v1/requests/{request_id}",status="200"} 2.0
ropeway:request_success_total{finished_reason="stop",model_name="m"} 4.0
ropeway:request_success_total{finished_reason="abort",model_name="m"} 1.0
ropeway:requests_refused_total{model_name="m"} 1.0
ropeway:slow_clients_total{model_name="m",phase="headers"} 1.0
ropeway:slow_clients_total{model_name="m",phase="body"} 0.0
"""


def agreeing() -> Ledger:
    ledger = Ledger()
    ledger.seen["POST", "/v1/completions", 200] = 3
    ledger.unseen["POST", "/v1/completions"] = 1
    ledger.seen["GET", "/v1/requests/{request_id}", 200] = 2
    ledger.note_ends("a", {"finish_reasons": ["stop"] * 4, "error": None}, 4)
    ledger.note_ends("b", {"finish_reasons": ["abort"], "error": "the client has left 9 bytes unread"}, 1)
    ledger.note_ends("c", {"finish_reasons": [None], "error": "the queue is full: 9 requests wait"}, 1)
    ledger.slow["headers"] = 1
    return ledger


def test_what_agrees_has_no_differences() -> None:
    assert agreeing().differences(METRICS) == []


def test_every_class_is_compared() -> None:
    twice = agreeing()
    twice.seen["POST", "/v1/completions", 200] = 2
    lost = agreeing()
    lost.seen["GET", "/v1/requests/{request_id}", 200] = 3
    never = agreeing()
    never.unseen["POST", "/v1/chat/completions"] = 1
    other = agreeing()
    other.ended.update({"stop": -1, "length": 1})
    refused = agreeing()
    refused.num_refused = 0
    slow = agreeing()
    slow.slow["body"] = 1
    found = [len(each.differences(METRICS)) for each in (twice, lost, never, other, refused, slow)]
    assert found == [1, 2, 1, 2, 1, 1]


def test_a_sequence_without_an_end_is_a_fault() -> None:
    ledger = Ledger()
    ledger.note_ends("a", {"finish_reasons": ["stop", None], "error": None}, 2)
    ledger.note_ends("b", {"finish_reasons": ["stop"], "error": None}, 2)
    assert len(ledger.faults) == 2
