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
from harness.contestants import HttpContestant, Measurement, Paddock, settings_of
from harness.environments import Environments
from harness.processes import (
    ContestantError,
    CpuTimes,
    free_port,
    resident_bytes,
    resident_parts,
    running_server,
)
from harness.results import describe_commit, describe_machine, markdown_table, new_document, save
from harness.rows import METRICS, ROWS, Row
from harness.schedule import expected_s, format_plan, plan_s, planned_rounds
from harness.targets import TARGETS, Target, doubtful_peers, format_comparison
from ropeway.bench.load import RequestRecord, Run
from ropeway.bench.report import summarise


def run_of(tokens_per_s: float, ttft_s: float) -> Run:
    """Two equal requests over one second of wall time."""
    tokens = round(tokens_per_s / 2)
    record = RequestRecord(0.0, 1.0, (ttft_s, 1.0), 100, tokens)
    return Run((record, record), 1.0, 0.0, None)


class FakeContestant:
    """Answers every row alike; counts its turns."""

    def __init__(self, name: str, tokens_per_s: float, ttft_s: float, turns: list[str], is_failing: bool) -> None:
        self.name = name
        self._is_failing = is_failing
        self._run = run_of(tokens_per_s, ttft_s)
        self._turns = turns

    def measure(self, row: Row, seed: int) -> Measurement:
        self._turns.append(f"{self.name}/{row.name}/{seed}")
        if self._is_failing:
            raise ContestantError("not installed")
        return Measurement(summarise(self._run, self.name), 0.25)


class FakePaddock:
    def __init__(self, failing: str = "openvino-int4", **rates: float) -> None:
        self.turns: list[str] = []
        self.settings: dict[str, str | None] = {}
        self._failing = failing
        self._rates = {"ropeway": 400.0} | {name.replace("_int4", "-int4"): rate for name, rate in rates.items()}

    def contestant(self, name: str, row_model: str, setting: str | None = None) -> FakeContestant:
        self.settings[name] = setting
        latency_s = 0.1 if name == "ropeway" else 0.4
        return FakeContestant(name, self._rates.get(name, 100.0), latency_s, self.turns, name == self._failing)


def arguments(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    fields = {"rows": ["c8"], "peers": ["llama-q4_0"], "seeds": [0, 1, 2], "num_requests": None, "settings": {}}
    fields |= {"processor": "own", "resume": None, "ropeway_options": "--max-num-seqs 8", "markdown": None}
    return argparse.Namespace(**(fields | changes))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "results" / "pairs.json"
    monkeypatch.setattr(peers, "result_path", lambda document: path)
    return path


def test_turns_alternate_and_every_run_and_pair_is_kept(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paddock = FakePaddock()
    markdown = tmp_path / "table.md"
    args = arguments(tmp_path, settings={"llama-q4_0": "flash-on"}, markdown=markdown)
    assert peers.run_rounds(args, paddock) == 0  # type: ignore[arg-type]
    assert paddock.turns == [
        *("ropeway/c8/0", "llama-q4_0/c8/0"),
        *("llama-q4_0/c8/1", "ropeway/c8/1"),
        *("ropeway/c8/2", "llama-q4_0/c8/2"),
    ]
    assert paddock.settings == {"ropeway": None, "llama-q4_0": "flash-on"}
    document = orjson.loads(results.read_bytes())
    assert len(document["runs"]) == 6 and len(document["pairs"]) == 3
    assert document["runs"][2]["order"] == ["llama-q4_0", "ropeway"]
    assert document["runs"][0]["num_requests"] == 64
    assert document["runs"][0]["disturbed_share"] == 0.25
    assert document["runs"][1]["setting"] == "flash-on" and document["runs"][0]["setting"] == "--max-num-seqs 8"
    assert document["pairs"][0]["ratios"]["output_tokens_per_s"] == 4.0
    assert document["options"]["ropeway_options"] == "--max-num-seqs 8"
    assert len(document["commit"]) == 40 and document["machine"]["num_cpus"] == os.cpu_count()
    table = capsys.readouterr().out
    assert "4.00–4.00 (3)" in table and markdown.read_text().strip() in table


def test_one_run_of_ropeway_is_paired_with_every_peer(tmp_path: Path, results: Path) -> None:
    paddock = FakePaddock(failing="")
    peers.run_rounds(arguments(tmp_path, rows=["c32"], peers=None, seeds=[0, 1]), paddock)  # type: ignore[arg-type]
    everybody = ["ropeway", "llama-q4_0", "llama-q4_1", "openvino-int4"]
    assert paddock.turns == [f"{name}/c32/0" for name in everybody] + [f"{name}/c32/1" for name in reversed(everybody)]
    pairs = orjson.loads(results.read_bytes())["pairs"]
    assert [(pair["peer"], pair["seed"]) for pair in pairs if pair["seed"] == 0] == [
        (name, 0) for name in everybody[1:]
    ]


def test_the_beaten_sit_out_where_the_best_peer_counts(tmp_path: Path, results: Path) -> None:
    paddock = FakePaddock(failing="", openvino_int4=120.0)
    peers.run_rounds(arguments(tmp_path, peers=None), paddock)  # type: ignore[arg-type]
    assert [turn for turn in paddock.turns if not turn.startswith("ropeway")] == [
        "llama-q4_0/c8/0", "openvino-int4/c8/0", "openvino-int4/c8/1", "openvino-int4/c8/2",
    ]  # fmt: skip


def test_nobody_sits_out_while_the_best_is_not_known(tmp_path: Path, results: Path) -> None:
    paddock = FakePaddock()
    assert peers.run_rounds(arguments(tmp_path, peers=None, seeds=[0, 1]), paddock) == 1  # type: ignore[arg-type]
    assert "llama-q4_0/c8/1" in paddock.turns and "openvino-int4/c8/1" in paddock.turns


def test_resuming_runs_only_what_is_missing(tmp_path: Path, results: Path) -> None:
    peers.run_rounds(arguments(tmp_path, seeds=[0]), FakePaddock())  # type: ignore[arg-type]
    paddock = FakePaddock()
    peers.run_rounds(arguments(tmp_path, resume=results), paddock)  # type: ignore[arg-type]
    assert [turn for turn in paddock.turns if turn.startswith("ropeway")] == ["ropeway/c8/1", "ropeway/c8/2"]
    assert len(orjson.loads(results.read_bytes())["pairs"]) == 3


def test_a_peer_that_fails_is_named_and_the_rest_is_measured(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path, peers=None, seeds=[0])
    assert peers.run_rounds(args, FakePaddock()) == 1  # type: ignore[arg-type]
    assert [pair["peer"] for pair in orjson.loads(results.read_bytes())["pairs"]] == ["llama-q4_0"]
    assert "not measured: not installed" in capsys.readouterr().err


def figures(tokens_per_s: float, latency_ms: float) -> dict[str, float | None]:
    return {name: tokens_per_s if name.endswith("per_s") else latency_ms for name in METRICS}


def result(row: str, contestant: str, seed: int, tokens_per_s: float, latency_ms: float = 100.0) -> dict[str, Any]:
    found = figures(tokens_per_s, latency_ms)
    return {"row": row, "contestant": contestant, "seed": seed, "num_requests": 1, "figures": found}


def lines_of(table: str, row: str, peer: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {line[2]: line[3:] for line in cells if line[:2] == [row, peer]}


def test_a_ratio_above_one_means_ahead_for_rates_and_for_latencies() -> None:
    runs = []
    for seed, latency_ms in enumerate((150.0, 200.0, 400.0)):
        runs += [result("c8", "ropeway", seed, 300.0), result("c8", "llama-q4_0", seed, 100.0, latency_ms)]
    lines = lines_of(format_comparison(runs), "c8", "llama-q4_0")
    assert lines["output tok/s"] == ["300.0", "100.0", "3.00", "3.00–3.00 (3)", "≥ 3", "pass"]
    assert lines["TTFT p50, ms"] == ["100.0", "200.0", "2.00", "1.50–4.00 (3)", "", ""]


def test_targets_are_passed_or_missed_by_the_median() -> None:
    runs = []
    for seed, rate in enumerate((100.0, 75.0, 74.0)):
        runs += [result("c32", "ropeway", seed, 300.0), result("c32", "llama-q4_0", seed, rate)]
    lines = lines_of(format_comparison(runs), "c32", "llama-q4_0")
    assert lines["output tok/s"][-2:] == ["≥ 4", "pass"]
    assert lines["TPOT p99, ms"][-2:] == ["> 1", "miss"], "equal is not below"
    assert lines["prompt tok/s"][-2:] == ["", ""], "no target"
    assert Target("c1", "x", "tpot_p50", 1 / 0.6).is_met(10.0 / 6.0)


def test_c128_is_held_beside_own_c32() -> None:
    runs = [result("c32", "ropeway", 0, 400.0), result("c128", "ropeway", 0, 370.0)]
    assert lines_of(format_comparison(runs), "c128", "own c32")["output tok/s"] == [
        "370.0", "400.0", "0.93", "0.93–0.93 (1)", "≥ 0.95", "miss",
    ]  # fmt: skip
    assert not lines_of(format_comparison(runs[:1]), "c128", "own c32")


def test_every_target_has_its_row_and_peer() -> None:
    for target in TARGETS:
        assert target.peer in ROWS[target.row].peers and target.metric in METRICS


def test_a_peer_far_below_its_first_look_is_doubtful() -> None:
    rates = {"llama-q4_0": 73.5, "llama-q4_1": 44.0, "openvino-int4": 87.0}
    runs = [result("c32", peer, 0, 1.4 * rate) for peer, rate in rates.items()]
    assert doubtful_peers(runs) == []
    runs[0]["figures"]["output_tokens_per_s"] = 0.8 * 1.4 * 73.5
    (sentence,) = doubtful_peers(runs)
    assert sentence.startswith("llama-q4_0 is at 0.80")


def test_the_plan_says_how_long_everything_takes() -> None:
    rounds = planned_rounds(list(ROWS.values()), None, [0, 1, 2])
    plan = format_plan(rounds)
    assert all(name in plan for name in ROWS) and f"about {plan_s(rounds) / 60:.0f} minutes" in plan
    per_row = [plan_s(planned_rounds([row], None, [0, 1, 2])) for row in ROWS.values()]
    assert plan_s(rounds) == pytest.approx(sum(per_row))
    assert plan_s(planned_rounds([ROWS["c1"]], ["llama-q4_0"], [0])) == pytest.approx(
        expected_s(ROWS["c1"], "ropeway") + expected_s(ROWS["c1"], "llama-q4_0")
    )


def test_the_best_settings_are_read_from_a_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.json"
    runs: list[dict[str, Any]] = [
        {"peer": "llama-q4_0", "setting": "default", "figures": figures(70.0, 1.0)},
        {"peer": "llama-q4_0", "setting": "flash-on", "figures": figures(80.0, 1.0)},
        {"peer": "llama-q4_0", "setting": "kv-q8_0", "error": "no such type"},
    ]
    save(sweep, {"runs": runs})
    assert peers.best_settings(sweep) == {"llama-q4_0": "flash-on"}


def test_commands_have_the_settings_and_what_a_row_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed(Environments):
        def python(self, name: str) -> Path:
            return Path(name)

        def q4_0_file(self, source: Path) -> Path:
            return Path("q4_0.gguf")

        def llama_1b_file(self) -> Path:
            return Path("1b.gguf")

    paddock = Paddock(Installed(tmp_path), Path("default.gguf"), tmp_path, ["--max-num-batched-tokens", "192"])
    ropeway = paddock.contestant("ropeway", "default")
    assert isinstance(ropeway, HttpContestant)
    assert "--no-enable-prefix-caching" in ropeway.command and ropeway.command[-1] == "192"
    assert ropeway.row_flags(ROWS["c128"]) == ("--max-num-seqs", "128", "--num-kv-blocks", "6144")
    assert ropeway.row_flags(ROWS["c8"]) == ("--max-num-seqs", "32")
    llama = paddock.contestant("llama-q4_0", "default", "half-slots")
    assert isinstance(llama, HttpContestant)
    assert "q4_0.gguf" in llama.command and llama.extra_body == {"cache_prompt": False}
    assert llama.row_flags(ROWS["c32"]) == ("--slots", "16", "--context-tokens", "1024")
    for name in ("ropeway", "llama-q4_0"):
        contestant = paddock.contestant(name, "llama-1b")
        assert isinstance(contestant, HttpContestant) and "1b.gguf" in contestant.command


def test_rows_ask_for_enough_and_fit_their_context() -> None:
    assert {name: row.num_requests for name, row in ROWS.items()} == {
        "c1": 48, "c8": 64, "c32": 256, "c128": 512, "prompt2k": 4, "prompt8k": 2, "llama-1b-c1": 12,
        "llama-1b-c16": 12,
    }  # fmt: skip
    for row in ROWS.values():
        assert max(len(r.prompt) + r.max_tokens for r in row.requests(0)) <= row.context_tokens
        assert row.requests(0) != row.requests(1)
    assert max(request.max_tokens for request in ROWS["llama-1b-c16"].requests(0)) <= 32


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


def test_the_parts_of_a_process_make_up_its_memory() -> None:
    block = b"x" * (32 << 20)  # too large for the heap
    parts, whole = resident_parts(os.getpid()), resident_bytes(os.getpid())
    assert parts["files"] and parts["heap"] and parts["anonymous"] >= len(block)
    assert sum(parts.values()) == pytest.approx(whole, rel=0.1)
