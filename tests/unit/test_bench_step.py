"""`ropeway bench step` on the tiny model: parts add up, steps hold what was asked for, table, plot and JSON agree."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import orjson
import pytest

from ropeway.bench.step import StepBenchOptions, StepProfile, format_profile, plot_profiles, run_step_bench
from ropeway.cli.main import main

PHASES = {"attention", "attn_output", "ffn_gate+ffn_up", "ffn_down", "attn_q+attn_k+attn_v"}


@pytest.fixture(scope="module")
def profiles(tiny_model_path: Path) -> list[StepProfile]:
    options = StepBenchOptions(str(tiny_model_path), (2, 5), context=20, prefill_tokens=9, num_threads=1, num_steps=6)
    return run_step_bench(options, lambda text: None)


def test_steps_hold_what_was_asked_for(profiles: list[StepProfile]) -> None:
    assert [profile.batch for profile in profiles] == [2, 5]
    for profile in profiles:
        assert profile.num_tokens == profile.batch + 9
        assert profile.num_steps == 6 and profile.num_threads == 1
        assert 20 < profile.mean_context < 20 + 6 + 10


def test_parts_are_disjoint_and_add_up(profiles: list[StepProfile]) -> None:
    for profile in profiles:
        assert sum(part.step_s for part in profile.parts) == pytest.approx(profile.step_s)
        assert all(part.step_s >= 0 for part in profile.parts)
        assert {part.name for part in profile.parts if part.group == "forward"} > PHASES
        assert sum(profile.group_s(group) for group in ("forward", "sample", "Python")) == pytest.approx(profile.step_s)
        assert 0 <= profile.lock_wait_s < profile.step_s and profile.bandwidth_share > 0
        for name in ("plan", "launch preparation", "commit", "detokenise", "encode events"):
            assert next(part for part in profile.parts if part.name == name).step_s > 0


def test_the_table_has_every_part(profiles: list[StepProfile]) -> None:
    table = format_profile(profiles[0])
    assert all(part.name in table for part in profiles[0].parts)
    assert "100.0%" in table and profiles[0].label in table


def test_bars_are_as_long_as_their_steps(profiles: list[StepProfile]) -> None:
    root = ElementTree.fromstring(plot_profiles("tiny", profiles))
    bars = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if len(rect)]
    lengths: dict[str, float] = {}
    for rect in bars:
        lengths[rect.attrib["y"]] = lengths.get(rect.attrib["y"], 0.0) + float(rect.attrib["width"])
    first, second = lengths.values()
    assert first / second == pytest.approx(profiles[0].step_s / profiles[1].step_s, rel=0.02)
    assert "script" not in "".join(element.tag for element in root.iter()) and "href" not in str(root.attrib)


def test_the_command_writes_table_json_and_plot(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path, plot_path = tmp_path / "steps.json", tmp_path / "steps.svg"
    command = ["bench", "step", "--model", str(tiny_model_path), "--batch", "3", "--context", "10", "--num-steps", "2"]
    assert main([*command, "--num-threads", "1", "--profile", "--json", str(json_path), "--plot", str(plot_path)]) == 0
    printed = capsys.readouterr().out
    assert "ffn_down" in printed and "launch preparation" in printed
    document = orjson.loads(json_path.read_bytes())
    assert document["options"]["batches"] == [3] and len(document["profiles"]) == 1
    assert plot_path.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch", "0"], "--batch 0"),
        (["--prefill-tokens", "-1"], "--prefill-tokens -1"),
        (["--plot", "steps.png"], "--plot steps.png"),
        (["--context", "5000"], "ask for a context of at most"),
    ],
)
def test_wrong_flags_are_told(
    tiny_model_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", "--model", str(tiny_model_path), *flags]) == 2
    assert message in capsys.readouterr().err
