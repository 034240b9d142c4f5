"""The short form of the kills: a few on the tiny model, the same code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import batch_kills


def test_a_killed_server_loses_nothing_and_answers_nothing_twice(tiny_model_path: Path, tmp_path: Path) -> None:
    part = replace(batch_kills.PARTS[0], num_kills=5, num_batches=4, num_lines=120, life_s=0.6)
    done = batch_kills.Round(part, tiny_model_path, tmp_path, seed=3, number=0).run(max_kills=5)
    assert done["is_same"] and done["num_answered"] == 480, done
    assert done["num_kills"] > 0 and done["num_files_acknowledged"] > 0, done["kills"]
