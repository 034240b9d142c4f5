"""Figures and pictures: the definitions stated in `report`, checked against numbers worked out by hand."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ropeway.bench.load import RequestRecord, Run
from ropeway.bench.plot import Panel, Series, render_svg
from ropeway.bench.report import Percentiles, format_failures, format_table, parse_goodput, summarise
from ropeway.bench.serve import BenchError, ServeBenchOptions, run_serve_bench
from ropeway.bench.server_counters import ServerCounters
from ropeway.cli import bench as bench_cli
from ropeway.errors import ConfigError
from support.fake_openai_server import FakeOpenAIServer


def record(start_s: float, chunks: tuple[float, ...], tokens: int, error: str | None = None) -> RequestRecord:
    return RequestRecord(start_s, chunks[-1], chunks, 10, tokens, error)


RUN = Run(
    records=(
        record(0.0, (0.1, 0.2, 0.4), 5),  # TTFT 100, TPOT 300/4 = 75, ITL 100 and 200, E2EL 400
        record(1.0, (1.3, 1.3), 3),  # TTFT 300, TPOT 0, ITL 0, E2EL 300
        record(0.0, (0.5,), 1),  # TTFT 500, no TPOT
        record(0.0, (9.0,), 7, error="wrong"),
    ),
    duration_s=2.0,
    client_cpu_s=0.0009,
    server_counters=ServerCounters(4, None),
)


def test_figures_worked_out_by_hand() -> None:
    summary = summarise(RUN, "x", {"ttft": 300.5, "tpot": 50.0})
    assert (summary.num_requests, summary.num_failed, summary.failures) == (4, 1, {"wrong": 1})
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (30, 9), "failures count for nothing"
    assert summary.output_tokens_per_s == 4.5
    assert summary.total_tokens_per_s == 19.5
    assert summary.requests_per_s == 1.5
    assert summary.ttft.p50 == pytest.approx(300)
    assert summary.ttft.p90 == pytest.approx(300 + 0.8 * 200), "linear between ranks"
    assert summary.tpot.mean == pytest.approx(37.5)
    assert summary.itl.p50 == pytest.approx(100)
    assert summary.e2el.p50 == pytest.approx(400)
    assert summary.goodput is not None
    assert (summary.goodput.num_requests, summary.goodput.requests_per_s) == (1, 0.5)
    assert summary.num_preemptions == 4
    assert summary.client_cpu_us_per_token == pytest.approx(100)


def test_a_run_in_which_everything_failed_has_no_latencies() -> None:
    summary = summarise(Run((record(0.0, (1.0,), 4, "bad"),), 1.0, 0.1, None), "x")
    assert summary.ttft == Percentiles(None, None, None, None)
    assert summary.output_tokens_per_s == 0
    assert summary.client_cpu_us_per_token is None
    assert "–" in format_table([summary])
    assert format_failures([summary]) == "x: 1 failed: bad"


def test_the_table_states_throughput_and_latency_together() -> None:
    table = format_table([summarise(RUN, "c=1", {"ttft": 1.0}), summarise(RUN, "c=2")])
    for name in ("output tokens/s", "TTFT p99, ms", "TPOT p50, ms", "ITL p90, ms", "E2EL p99, ms", "ttft≤1ms"):
        assert name in table
    assert "recomputed" not in table, "not exposed by this server"
    assert len({len(line) for line in table.splitlines()}) == 1


@pytest.mark.parametrize("items", [["ttft"], ["ttft:x"], ["ttft:-3"], ["itl:5"], ["ttft:nan"]])
def test_bad_goodput_limits(items: list[str]) -> None:
    with pytest.raises(ConfigError, match="goodput limit"):
        parse_goodput(items)


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:500", "tpot:100.5"]) == {"ttft": 500.0, "tpot": 100.5}


def test_the_picture_is_self_contained_and_to_scale() -> None:
    panel = Panel("a < b", "x, ms", "tokens/s", (Series("p50", ((0.0, 0.0), (50.0, 100.0)), ("c=1", "c=8"), True),))
    svg = render_svg("Title & more", [panel, panel, panel])
    root = ElementTree.fromstring(svg)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Title & more", "a < b", "x, ms", "tokens/s", "50", "100", "p50", "c=8"} <= set(texts)
    circles = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    (x0, y0), (x1, y1) = circles[:2]
    assert x1 > x0 and y1 < y0
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("largest", [1e-4, 0.3, 1.0, 7.0, 999.0, 123456.0])
def test_ticks_reach_the_largest_value_and_are_few(largest: float) -> None:
    from ropeway.bench.plot import _Scale

    scale = _Scale.fit(largest, 0, 100)
    assert scale.limit >= largest * (1 - 1e-9)
    assert 2 <= len(scale.ticks) <= 8


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_cli.add_parser(parser.add_subparsers(required=True))
    return parser.parse_args(["bench", "serve", *argv])


def test_the_command_from_flags_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_path, svg_path = tmp_path / "out.json", tmp_path / "out.svg"
    with FakeOpenAIServer().running() as server:
        args = parse(
            *("--url", server.url, "--concurrency", "1", "3", "--num-requests", "6", "--output-max", "80"),
            *("--goodput", "ttft:5000", "--json", str(json_path), "--plot", str(svg_path), "--api-key", "hush"),
        )
        assert args.run(args) == 0
    document = json.loads(json_path.read_text())
    assert [run["label"] for run in document["runs"]] == ["c=1", "c=3"]
    assert all(run["num_failed"] == 0 and run["num_requests"] == 6 for run in document["runs"])
    assert [run["num_preemptions"] for run in document["runs"]] == [6, 6]
    assert document["options"]["seed"] == 0
    assert "hush" not in json_path.read_text()
    assert server.bodies[0]["model"] == "fake-model"
    assert ElementTree.fromstring(svg_path.read_text()) is not None
    assert "output tokens/s" in capsys.readouterr().out


def test_prompts_from_a_file_and_arrivals(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two"}\n{"prompt": [4, 5], "max_tokens": 2}\n')
    with FakeOpenAIServer().running() as server:
        args = parse("--url", server.url, "--request-rate", "200", "--prompts", str(prompts), "--max-tokens", "3")
        assert args.run(args) == 0
    assert sorted(body["max_tokens"] for body in server.bodies[1:]) == [2, 3]


def test_a_wrong_answer_makes_the_command_fail(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeOpenAIServer(usage_offset=1)
    with server.running():
        args = parse("--url", server.url, "--num-requests", "2", "--num-warmup-requests", "0")
        assert args.run(args) == 1
    assert "wrong number of output tokens" in capsys.readouterr().err


def test_user_errors_are_named(tmp_path: Path) -> None:
    for argv, message in (
        (("--concurrency", "0"), "--concurrency 0"),
        (("--extra-body", "[]"), "not a JSON object"),
        (("--extra-body", "{"), "not JSON"),
        (("--plot", "x.png"), "known format"),
        (("--seed", "-1"), "--seed -1"),
    ):
        args = parse(*argv)
        with pytest.raises(ConfigError, match=message):
            args.run(args)
    with pytest.raises(BenchError, match="is a server running there"):
        run_serve_bench(ServeBenchOptions(base_url="http://127.0.0.1:9", concurrencies=(1,)))
    with FakeOpenAIServer(refusal=(404, {"error": {"message": "no"}})).running() as server:
        with pytest.raises(BenchError, match="warm-up request .* failed: HTTP 404: no"):
            run_serve_bench(ServeBenchOptions(base_url=server.url, concurrencies=(1,)))
        args = parse("--url", server.url, "--num-warmup-requests", "0", "--json", str(tmp_path / "no" / "x.json"))
        args.num_requests = 1
        with pytest.raises(ConfigError, match="cannot write"):
            args.run(args)
