"""What the side-by-side benchmarks claim with: pairs, ratios, tables, processes. No peer is needed here."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

import batching
import peers
from harness.contestants import HttpContestant, Measurement, settings_of
from harness.processes import ContestantError, CpuTimes, free_port, running_server
from harness.results import describe_commit, describe_machine, markdown_table, new_document, save
from harness.rows import METRICS, ROWS, Row, metric
from ropeway.bench.load import RequestRecord, Run
from ropeway.bench.report import summarise


def run_of(tokens_per_s: float, ttft_s: float) -> Run:
    """Two equal requests over one second of wall time."""
    tokens = round(tokens_per_s / 2)
    record = RequestRecord(0.0, 1.0, (ttft_s, 1.0), 100, tokens)
    return Run((record, record), 1.0, 0.0, None)


class FakeContestant:
    """Answers every row alike; counts its turns."""

    def __init__(self, name: str, tokens_per_s: float, ttft_s: float, turns: list[str]) -> None:
        self.name = name
        self._run = run_of(tokens_per_s, ttft_s)
        self._turns = turns

    def measure(self, row: Row, seed: int) -> Measurement:
        self._turns.append(f"{self.name}/{row.name}/{seed}")
        if self.name == "openvino-int4":
            raise ContestantError("not installed")
        return Measurement(summarise(self._run, self.name), 0.25)


class FakePaddock:
    def __init__(self) -> None:
        self.turns: list[str] = []

    def ropeway(self) -> FakeContestant:
        return FakeContestant("ropeway", 400.0, 0.1, self.turns)

    def peer(self, name: str, setting: str | None = None) -> FakeContestant:
        return FakeContestant(name, 100.0, 0.4, self.turns)


def arguments(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    fields = {"rows": ["c8"], "peers": ["llama-q4_0"], "seeds": [0, 1, 2], "num_requests": None, "settings": {}}
    return argparse.Namespace(**(fields | {"resume": None, "ropeway_options": "--max-num-seqs 8"} | changes))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "results" / "pairs.json"
    monkeypatch.setattr(peers, "result_path", lambda document: path)
    return path


def test_pairs_alternate_and_are_all_kept(tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paddock = FakePaddock()
    assert peers.run_pairs(arguments(tmp_path), paddock) == 0  # type: ignore[arg-type]
    assert paddock.turns == [
        *("ropeway/c8/0", "llama-q4_0/c8/0"),
        *("llama-q4_0/c8/1", "ropeway/c8/1"),
        *("ropeway/c8/2", "llama-q4_0/c8/2"),
    ]
    document = orjson.loads(results.read_bytes())
    assert len(document["pairs"]) == 3
    assert document["pairs"][1]["order"] == ["llama-q4_0", "ropeway"]
    assert document["pairs"][0]["num_requests"] == 64
    assert document["pairs"][0]["ropeway_run"]["disturbed_share"] == 0.25
    assert document["options"]["ropeway_options"] == "--max-num-seqs 8"
    assert len(document["commit"]) == 40 and document["machine"]["num_cpus"] == os.cpu_count()
    table = capsys.readouterr().out
    assert "4.00–4.00 (3)" in table


def test_resuming_runs_only_what_is_missing(tmp_path: Path, results: Path) -> None:
    peers.run_pairs(arguments(tmp_path, seeds=[0]), FakePaddock())  # type: ignore[arg-type]
    paddock = FakePaddock()
    peers.run_pairs(arguments(tmp_path, resume=results), paddock)  # type: ignore[arg-type]
    assert [turn for turn in paddock.turns if turn.startswith("ropeway")] == ["ropeway/c8/1", "ropeway/c8/2"]
    assert len(orjson.loads(results.read_bytes())["pairs"]) == 3


def test_a_peer_that_fails_is_named_and_the_rest_is_measured(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path, peers=None, seeds=[0])
    assert peers.run_pairs(args, FakePaddock()) == 1  # type: ignore[arg-type]
    assert [pair["peer"] for pair in orjson.loads(results.read_bytes())["pairs"]] == ["llama-q4_0"]
    assert "not measured: not installed" in capsys.readouterr().err


def test_a_ratio_above_one_means_ahead_for_rates_and_for_latencies() -> None:
    def run(tokens_per_s: float, ttft_ms: float) -> dict[str, Any]:
        summary = summarise(run_of(tokens_per_s, ttft_ms / 1e3), "x")
        return {"figures": {name: metric(summary, name) for name in METRICS}}

    pairs = [
        {"row": "c8", "peer": "p", "seed": seed, "ropeway_run": run(300.0, 100.0), "peer_run": run(100.0, ttft_ms)}
        for seed, ttft_ms in enumerate((150.0, 200.0, 400.0))
    ]
    lines = {line.split("|")[3].strip(): line for line in peers.format_pairs(pairs).splitlines()[2:]}
    assert "3.00" in lines["output tok/s"]
    assert "2.00 " in lines["TTFT p50, ms"] and "1.50–4.00 (3)" in lines["TTFT p50, ms"]


def test_rows_ask_for_enough_and_fit_their_context() -> None:
    assert {name: row.num_requests for name, row in ROWS.items()} == {
        "c1": 48, "c8": 64, "c32": 256, "c128": 512, "prompt2k": 4, "prompt8k": 2,
    }  # fmt: skip
    for row in ROWS.values():
        assert max(len(r.prompt) + r.max_tokens for r in row.requests(0)) <= row.context_tokens
        assert row.requests(0) != row.requests(1)


@pytest.mark.parametrize("peer", ["llama-q4_0", "openvino-int4"])
def test_the_sweep_has_settings_to_choose_from(peer: str) -> None:
    assert len(settings_of(peer)) >= 4


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_runs_until_the_block_ends(tmp_path: Path) -> None:
    port = free_port()
    with running_server([sys.executable, "-c", SERVER, str(port)], port, tmp_path / "log", 20.0) as process_id:
        assert Path(f"/proc/{process_id}").exists()
    assert not Path(f"/proc/{process_id}").exists()


def test_a_server_that_dies_or_never_answers_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ContestantError, match="status 3 before it was ready:\nno model"):
        code = "import sys; print('no model'); sys.exit(3)"
        with running_server([sys.executable, "-c", code], free_port(), tmp_path / "log", 20.0):
            pass
    with pytest.raises(ContestantError, match="not ready within 0.2 s"):
        with running_server([sys.executable, "-c", "input()"], free_port(), tmp_path / "log", 0.2):
            pass


def test_processor_time_is_told_apart() -> None:
    before = CpuTimes.now(os.getpid())
    end = time.process_time() + 0.15
    while time.process_time() < end:
        pass
    after = CpuTimes.now(os.getpid())
    assert after.harness_s - before.harness_s >= 0.15
    assert after.machine_s >= before.machine_s
    assert CpuTimes(10.0, 3.0, 2.0).others_since(CpuTimes(4.0, 1.0, 1.5)) == pytest.approx(3.5)
    assert CpuTimes.now(2**22 + 5).contestant_s == 0.0, "no such process"


def test_wrong_answers_are_no_measurement(tmp_path: Path) -> None:
    from support.fake_openai_server import FakeOpenAIServer

    contestant = HttpContestant("fake", ("unused",), lambda row: (), tmp_path / "log", {})
    with FakeOpenAIServer(usage_offset=1).running() as server:
        import uvloop

        with pytest.raises(ContestantError, match="64 of 64 failed"):
            uvloop.run(contestant._measure(ROWS["c8"], 0, server.port, os.getpid()))


def test_result_files_are_whole_or_old(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    save(path, new_document("x", {"a": 1}))
    assert orjson.loads(path.read_bytes())["options"] == {"a": 1}
    with pytest.raises(TypeError):
        save(path, {"bad": object()})
    assert orjson.loads(path.read_bytes())["options"] == {"a": 1}
    assert describe_machine()["memory_gib"] > 0
    assert isinstance(describe_commit()["is_dirty"], bool)


def test_tables_are_padded() -> None:
    assert markdown_table(("a", "bb"), [("ccc", "d")]) == "| a   | bb |\n|-----|----|\n| ccc | d  |"


@pytest.mark.parametrize("sigma", batching.SIGMAS)
def test_output_lengths_spread_but_keep_their_mean(sigma: float) -> None:
    requests = batching.requests_for(sigma, 192, 1, 49152)
    lengths = [request.max_tokens for request in requests]
    assert sum(lengths) == pytest.approx(192 * batching.MEAN_OUTPUT, rel=0.01)
    assert max(lengths) <= batching.MAX_OUTPUT
    assert (len(set(lengths)) == 1) == (sigma == 0)
    assert [request.prompt for request in requests] == [
        request.prompt for request in batching.requests_for(0.0, 192, 1, 49152)
    ], "only the output lengths may differ between rows"


def document(static_at_zero: float) -> dict[str, Any]:
    runs = []
    for sigma in batching.SIGMAS:
        for mode, rate in (("continuous", 100.0), ("static", static_at_zero - 30 * sigma), ("static-padded", 50.0)):
            for seed in range(3):
                summary = summarise(run_of(2 * round(rate / 2) + 2 * seed, 0.1), mode).to_dict()
                runs.append({"sigma": sigma, "seed": seed, "mode": mode, "summary": summary})
    return {"runs": runs}


def test_the_gain_is_taken_within_a_seed_and_an_unfair_baseline_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    fair = document(96.0)
    assert batching.gains(fair, 0.0, "static") == pytest.approx([100 / 96, 102 / 98, 104 / 100])
    assert not batching.check_baseline(fair), "padded is half as fast at sigma 0"
    assert "static-padded at sigma 0 is 1.9" in capsys.readouterr().out
    table = batching.format_table(fair)
    assert len(table.splitlines()) == 2 + 4 * 3
    assert "gain of continuous" in batching.plot(fair).lower()
