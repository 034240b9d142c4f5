"""The short form of `make evidence-schemathesis`: nothing that the OpenAPI document allows or forbids meets a 5xx."""

from __future__ import annotations

from support.schemathesis_run import run_schemathesis


def test_no_request_made_from_the_document_meets_a_server_error() -> None:
    run = run_schemathesis(max_examples=2, seed=1)
    assert run.is_good, run.printed[-4000:]
    assert run.num_cases > 500
