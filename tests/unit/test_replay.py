"""A recorded schedule is rebuilt byte for byte; a scheduler that chooses otherwise is found out."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ropeway.cli.main import main
from ropeway.core.decision_log import AddRecord, CommitRecord, DecisionLog, LogEncoder, PlanRecord, Record
from ropeway.core.params import ServiceTerms
from ropeway.engine.decision_recorder import DecisionRecorder, RecordingHasher
from ropeway.engine.engine import Engine
from ropeway.sim.cost_model import TWO_CORES
from ropeway.sim.replay import Replay, ReplayDifference
from ropeway.sim.simulator import AnswerLengths, VirtualClock
from ropeway.sim.timeline import Timeline
from support.eventful_run import COSTS, RECIPE, SometimesFailing, arrivals, record


@pytest.mark.parametrize(
    ("batching", "has_prefix_cache"),
    [("continuous", True), ("continuous", False), ("static", False), ("static-padded", False)],
)
def test_an_eventful_schedule_is_rebuilt(batching: str, has_prefix_cache: bool) -> None:
    records, data = record(replace(RECIPE, batching=batching, has_prefix_cache=has_prefix_cache))
    replay = Replay(DecisionLog(data))
    assert [replayed.record for replayed in replay.run()] == records
    stats = replay.stats()
    assert replay.cut_at is None and stats.num_failed_steps > 0 and all(stats.num_finished.values())
    assert stats.num_timeouts > 0
    assert batching != "continuous" or stats.num_preemptions > 0
    assert bool(stats.num_prefix_hits) == has_prefix_cache


def test_requests_that_run_out_of_time_in_a_pause_leave_the_replay_exact() -> None:
    records: list[Record] = []
    clock, lengths = VirtualClock(1_000.0), AnswerLengths()
    recorder = DecisionRecorder(records.append, b"key")
    scheduler = RECIPE.make(RecordingHasher(RECIPE.block_size, recorder.note_hash))
    engine = Engine(scheduler, SometimesFailing(clock, TWO_CORES, lengths), clock, recorder)
    draw = random.Random(5)
    for arrival in arrivals(12, draw):
        lengths.script(arrival.request.request_id, arrival.num_output_tokens)
        engine.submit(replace(arrival.request, terms=ServiceTerms(timeout_s=4.0, tenant=arrival.request.terms.tenant)))
    for _ in range(3):
        engine.step()
    clock.wait_until(clock() + 5.0)  # paused: nothing is planned
    expired = engine.expire()
    assert expired and all(event.timeout == "request" and event.finish_reason == "error" for event in expired)
    lengths.script("after", 10)
    engine.submit(replace(arrivals(1, draw)[0].request, request_id="after"))
    while engine.has_work:
        engine.step()
    encoder = LogEncoder()
    data = b"".join([encoder.header(RECIPE.to_values()), *map(encoder.encode, records)])
    assert [replayed.record for replayed in Replay(DecisionLog(data)).run()] == records


def test_the_recorder_forgets_who_ran_out_of_time_in_a_step() -> None:
    records: list[Record] = []
    clock, lengths = VirtualClock(1_000.0), AnswerLengths()
    recorder = DecisionRecorder(records.append, b"key")
    engine = Engine(RECIPE.make(), SometimesFailing(clock, TWO_CORES, lengths), clock, recorder)
    request = replace(arrivals(1, random.Random(5))[0].request, terms=ServiceTerms(timeout_s=1.0))
    lengths.script(request.request_id, 10)
    engine.submit(request)
    clock.wait_until(clock() + 2.0)
    assert all(event.timeout == "request" for event in engine.step())
    engine.abort(request.request_id)  # as its client does
    assert not recorder._followed and [type(record) for record in records] == [AddRecord, PlanRecord]


def test_any_name_can_be_logged() -> None:
    recorder = DecisionRecorder(lambda record: None, b"key")
    assert recorder.name_digest("\ud800") != recorder.name_digest("?")


@pytest.mark.parametrize("targets", [{}, {"objective": "latency"}, {"slo_tpot_s": 0.03, "slo_ttft_s": 20.0}])
def test_a_schedule_paced_and_predicted_is_rebuilt(targets: dict[str, float]) -> None:
    recipe = replace(RECIPE, admission="predictive", **COSTS, **targets)  # type: ignore[arg-type]
    records, data = record(recipe, num_requests=160)
    replay = Replay(DecisionLog(data))
    assert [replayed.record for replayed in replay.run()] == records
    assert replay.stats().pacing is not None and replay.stats().num_steps > 100


def test_a_schedule_with_waves_is_rebuilt() -> None:
    costs = {"step_fixed_s": 4e-3, "step_token_s": 1e-3, "step_later_token_s": 1e-3, "step_read_s": 1e-2}
    recipe = replace(RECIPE, num_layers=4, **costs)  # type: ignore[arg-type]
    records, data = record(recipe, num_requests=160)
    assert [replayed.record for replayed in Replay(DecisionLog(data)).run()] == records
    slices = [r.plan.layer_slice for r in records if isinstance(r, PlanRecord) and r.plan and r.plan.layer_slice]
    assert len(slices) > 20 and any(layer_slice.is_last for layer_slice in slices)


def test_a_scheduler_that_asks_for_other_hashes_is_found_out() -> None:
    records, _ = record(replace(RECIPE, has_prefix_cache=True))
    number, committed = next((i, r) for i, r in enumerate(records) if isinstance(r, CommitRecord) and r.digests)
    for digests, told in ((committed.digests * 2, "fewer than"), ((), "does not have")):
        records[number] = replace(committed, digests=digests)
        encoder = LogEncoder()
        header = encoder.header(replace(RECIPE, has_prefix_cache=True).to_values())
        with pytest.raises(ReplayDifference, match=told):
            list(Replay(DecisionLog(b"".join([header, *map(encoder.encode, records)]))).run())


def test_tokens_and_names_are_not_in_a_log() -> None:
    _, data = record(RECIPE)
    assert b"secret" not in data and b"request-" not in data


def test_a_cut_log_is_replayed_up_to_the_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.log"
    path.write_bytes(record(RECIPE)[1][:2_000])
    assert main(["replay", str(path)]) == 0
    printed = capsys.readouterr()
    assert "cut off at byte" in printed.err and "steps rebuilt, identical" in printed.out


@pytest.mark.parametrize("change", [{"num_kv_blocks": 36}, {"max_num_seqs": 5}, {"max_num_batched_tokens": 23}])
def test_a_scheduler_that_chooses_otherwise_is_found_out(change: dict[str, int], tmp_path: Path) -> None:
    records, _ = record(RECIPE)
    encoder = LogEncoder()
    other = replace(RECIPE, **change)  # type: ignore[arg-type]
    data = b"".join([encoder.header(other.to_values()), *map(encoder.encode, records)])
    with pytest.raises(ReplayDifference, match=r"step \d+ differs in \w+: .* in the log, .* here"):
        list(Replay(DecisionLog(data)).run())
    path = tmp_path / "other.log"
    path.write_bytes(data)
    assert main(["replay", "--quiet", str(path)]) == 1


def test_the_table_and_the_timeline_show_the_steps_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plot = tmp_path / "run.log", tmp_path / "run.svg"
    path.write_bytes(record(RECIPE)[1])
    assert main(["replay", "--steps", "10:20", "--plot", str(plot), str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [str(step) for step in range(10, 20)]
    svg = plot.read_text()
    assert svg.startswith("<svg") and "href" not in svg and "decode" in svg
    with pytest.raises(SystemExit, match="2"):
        main(["replay", "--steps", "ten", str(path)])


def test_a_timeline_tells_every_phase() -> None:
    records, _ = record(RECIPE)
    timeline = Timeline()
    timeline.follow(records)
    lanes = timeline.lanes.values()
    assert {phase for lane in lanes for phase, _, _ in lane.spans} == {"waiting", "prefill", "decode", "preempted"}
    for lane in lanes:
        assert lane.end_s is not None
        for (_, _, end_s), (_, start_s, _) in zip(lane.spans, lane.spans[1:], strict=False):
            assert start_s == end_s, "a gap in a lane"
    assert sum(isinstance(r, PlanRecord) for r in records) > 100
