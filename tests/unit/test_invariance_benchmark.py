"""The invariance benchmark on a small model: it records what it compared, goes on where it stopped, finds a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.support.faulty_backends import WrongInCompany

import invariance
from ropeway.model.loading import load_model


def new_document(num_combinations: int) -> dict[str, Any]:
    options = invariance.options_of(seed=5, num_combinations=num_combinations, model="random")
    return {"options": options | {"num_requests": 8, "max_prompt_tokens": 40, "max_tokens": 6}}


def test_a_run_is_recorded_and_goes_on_where_it_stopped(tiny_model_path: Path, tmp_path: Path) -> None:
    model, path = load_model(tiny_model_path), tmp_path / "run.json"
    whole, half = new_document(3), new_document(2)
    assert invariance.Experiment(whole, path, model).run()
    assert invariance.Experiment(half, path, model).run()
    resumed = orjson.loads(path.read_bytes())
    assert len(resumed["combinations"]) == 2
    resumed["options"]["num_combinations"] = 3
    assert invariance.Experiment(resumed, path, model).run()
    for document in (whole, resumed):
        for combination in document["combinations"]:
            del combination["wall_s"]
    assert resumed == whole and whole["num_compared"] > 50 and whole["first_difference"] is None


def test_a_planted_difference_is_found_and_recorded(tiny_model_path: Path, tmp_path: Path) -> None:
    document, path = new_document(2), tmp_path / "run.json"
    assert not invariance.Experiment(document, path, load_model(tiny_model_path), WrongInCompany).run()
    recorded = orjson.loads(path.read_bytes())
    assert recorded["first_difference"]["what"] == "logits" and recorded["num_differing_combinations"] > 0


def test_a_run_of_another_commit_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(orjson.dumps({"commit": "0" * 40}))
    with pytest.raises(SystemExit, match="00000000"):
        invariance.resumed(path)
