"""The same logits and tokens under every pair of options of the scheduler, on a random model: a covering array, and a
preemption at every step of a request's life. That a planted difference is found.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.covering import all_pairs, covering_array, pairs_of
from tests.support.faulty_backends import CopiesNothing, WrongInCompany
from tests.support.invariance import (
    CHOICES,
    Answers,
    Options,
    Served,
    Trial,
    answers_alone,
    compare,
    make_requests,
)
from tests.support.random_gguf import RandomModel, write_random_gguf

from ropeway.core.params import Request
from ropeway.core.sequence import Sequence
from ropeway.model.loading import Model, load_model
from ropeway.model.weights import TensorType

COMBINATIONS = covering_array(CHOICES)


class Question:
    """A random model, requests to it, and what comes of each alone."""

    def __init__(self, path: Path) -> None:
        self.model: Model = load_model(path)
        self.requests: list[Request] = make_requests(
            self.model.program.vocab_size, num_requests=12, max_prompt_tokens=70, max_tokens=24, seed=3
        )
        self.alone: Answers = {}
        for request in self.requests:
            self.alone |= answers_alone(self.model, request)


@pytest.fixture(scope="module")
def question(tmp_path_factory: pytest.TempPathFactory) -> Question:
    shape = RandomModel(weight_type=TensorType.Q4_1, head_type=TensorType.Q8_0, vocab_size=331)
    return Question(write_random_gguf(tmp_path_factory.mktemp("pairs") / "model.gguf", shape))


def test_the_combinations_hold_every_pair() -> None:
    held = {pair for combination in COMBINATIONS for pair in pairs_of(combination)}
    assert held == set(all_pairs(CHOICES))
    assert len(COMBINATIONS) < 40


def has_effect(options: Options, served: Served) -> dict[str, bool]:
    """Whether the options that can be seen in what was counted did what they are named for."""
    stats = served.stats
    return {
        "forced": options.preemption == "natural" or stats.num_preemptions >= len(served.answers) / 2,
        "hit": options.prefix_cache != "hit" or options.pool == "tight" or stats.num_prefix_hits > 100,
        "partial": options.prefix_cache != "partial" or options.pool == "tight" or stats.num_prefix_hits > 50,
        "off": options.prefix_cache != "off" or stats.num_prefix_hits == 0,
        "aborted": options.mates != "aborted" or stats.num_finished["abort"] > 0,
        "timed out": options.mates != "timed out" or stats.num_timeouts > 0,
        "n": any(index for _, index in served.answers) == (options.n > 1),
    }


@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_every_pair_of_options_leaves_the_logits_as_they_are(question: Question, number: int) -> None:
    options = Options(**COMBINATIONS[number])
    served = Trial(question.model, question.requests, options, random.Random(number)).run()
    num_compared, difference = compare(served, question.alone)
    assert difference is None, f"{options}: {difference}"
    assert num_compared > len(served.answers)
    effects = has_effect(options, served)
    assert all(effects.values()), (options, effects, served.stats)


@pytest.mark.parametrize("number", [i for i, chosen in enumerate(COMBINATIONS) if chosen["pacing"] == "fixed"])
def test_waves_leave_the_logits_as_they_are(question: Question, number: int) -> None:
    """Aborted, preempted and timed out in the middle of one, too."""
    options = replace(Options(**COMBINATIONS[number]), pacing="waves")
    trial = Trial(question.model, question.requests, options, random.Random(number))
    num_compared, difference = compare(trial.run(), question.alone)
    assert difference is None, f"{options}: {difference}"
    assert num_compared > 0 and trial._backend.num_slices > 20


def test_memory_that_runs_out_leaves_the_logits_as_they_are(question: Question) -> None:
    num_preemptions = {}
    for admission in ("optimistic", "reserve"):
        options = Options(admission=admission, pool="tight", max_num_seqs=16, prefix_cache="hit", block_size=8)
        served = Trial(question.model, question.requests, options, random.Random(1)).run()
        assert compare(served, question.alone)[1] is None
        assert served.stats.num_evicted_blocks > 0
        num_preemptions[admission] = served.stats.num_preemptions
    assert num_preemptions["optimistic"] > 0 and num_preemptions["reserve"] == 0


@pytest.mark.parametrize("prefix_cache", ["off", "hit"])
@pytest.mark.parametrize("token_budget", [16, 4096])
def test_a_preemption_after_each_step(question: Question, prefix_cache: str, token_budget: int) -> None:
    request = question.requests[1]  # the longest
    options = Options(prefix_cache=prefix_cache, token_budget=token_budget, n=1)

    def run(step: int | None) -> Served:
        steps_left = [step]

        def choose(running: list[Sequence]) -> Sequence | None:
            if steps_left[0] is None or not running:
                return None
            steps_left[0] -= 1
            return running[0] if steps_left[0] == -1 else None

        return Trial(question.model, [request], options, random.Random(0)).run(choose)

    undisturbed = run(None)
    num_steps = undisturbed.stats.num_steps - (prefix_cache == "hit") * -(
        -len(request.prompt_token_ids) // token_budget
    )
    assert num_steps >= request.max_tokens
    for step in range(num_steps - 1):  # after the last nobody runs
        served = run(step)
        assert served.stats.num_preemptions == 1
        assert compare(served, question.alone)[1] is None


def test_a_planted_difference_of_one_bit_is_found(question: Question) -> None:
    served = Trial(question.model, question.requests, Options(max_num_seqs=4), backend_type=WrongInCompany).run()
    _, difference = compare(served, question.alone)
    assert difference is not None and difference.what == "logits" and difference.got != difference.alone


def test_a_block_that_is_not_copied_is_found(question: Question) -> None:
    options = Options(max_num_seqs=4, prefix_cache="hit")
    served = Trial(question.model, question.requests, options, backend_type=CopiesNothing).run()
    _, difference = compare(served, question.alone)
    assert served.num_blocks_copied > 0 and difference is not None
