"""What decodes take undisturbed, of what is predicted for them."""

from __future__ import annotations

import pytest

from ropeway.core.undisturbed import MAX_NUM_DISTURBED, MAX_SHARE, MIN_SHARE, Undisturbed


def test_a_look_is_due_where_prompts_never_cease() -> None:
    undisturbed = Undisturbed()
    for _ in range(MAX_NUM_DISTURBED):
        assert not undisturbed.is_look_due
        undisturbed.observe(1.0, 1.0, is_alone=False)
    assert undisturbed.is_look_due
    undisturbed.observe(1.0, 1.0, is_alone=True)
    assert not undisturbed.is_look_due


def test_it_follows_decodes_alone_and_nothing_else() -> None:
    undisturbed = Undisturbed()
    for _ in range(60):
        undisturbed.observe(1.0, 3.0, is_alone=False)
        undisturbed.observe(1.0, 0.8, is_alone=True)
    assert undisturbed.share == pytest.approx(0.8, abs=0.01)


def test_one_slow_step_is_no_news() -> None:
    undisturbed = Undisturbed()
    undisturbed.observe(1.0, 50.0, is_alone=True)
    assert undisturbed.share < 1.04


@pytest.mark.parametrize(("step_s", "bound"), [(100.0, MAX_SHARE), (1e-9, MIN_SHARE)])
def test_it_is_bounded(step_s: float, bound: float) -> None:
    undisturbed = Undisturbed()
    for _ in range(200):
        undisturbed.observe(1.0, step_s, is_alone=True)
    assert undisturbed.share == bound
