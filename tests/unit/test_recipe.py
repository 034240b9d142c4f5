"""A recipe makes the scheduler its names say, and survives the way through a log's header."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ropeway.core.recipe import SchedulerRecipe
from ropeway.errors import ConfigError

RECIPE = SchedulerRecipe(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_kv_blocks=100, block_size=4)


def test_a_recipe_survives_the_way_through_values() -> None:
    assert SchedulerRecipe.from_values(RECIPE.to_values()) == RECIPE


@pytest.mark.parametrize("values", [{}, {"max_num_seqs": 1}, RECIPE.to_values() | {"unheard_of": 1}])
def test_values_of_no_recipe_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="no scheduler can be made"):
        SchedulerRecipe.from_values(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["vtc", "fcfs", "priority", "spf"])
def test_every_policy_by_its_name(policy: str) -> None:
    recipe = replace(RECIPE, scheduling_policy=policy, priority_aging_s=0.0, background_share=0.5)
    assert recipe.make().plan(0.0) is None
    with pytest.raises(ConfigError, match="scheduling_policy must be one of vtc, fcfs, priority, spf, not 'lottery'"):
        replace(RECIPE, scheduling_policy="lottery").make()


def test_the_scheduler_has_the_limits_of_its_recipe() -> None:
    scheduler = RECIPE.make()
    assert scheduler.max_model_len == 64 and scheduler.stats().num_blocks == 100
