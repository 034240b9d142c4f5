"""The synthetic workload is seeded, ragged as stated, and JSONL prompts are read strictly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ropeway.bench.workload import (
    RAGGED_OUTPUTS,
    RAGGED_PROMPTS,
    BenchRequest,
    LengthDistribution,
    SyntheticWorkload,
    default_num_requests,
    load_requests,
    poisson_arrivals_s,
)
from ropeway.errors import ConfigError


def test_lengths_follow_the_stated_lognormal() -> None:
    unclipped = LengthDistribution(mean=128, sigma=0.8, maximum=10**6)
    lengths = unclipped.draw(np.random.default_rng(1), 200_000)
    assert np.mean(lengths) == pytest.approx(128, rel=0.01)
    assert np.std(np.log(lengths)) == pytest.approx(0.8, rel=0.01)


@pytest.mark.parametrize("lengths", [RAGGED_PROMPTS, RAGGED_OUTPUTS])
def test_lengths_are_clipped(lengths: LengthDistribution) -> None:
    drawn = lengths.draw(np.random.default_rng(1), 20_000)
    assert min(drawn) >= 1
    assert max(drawn) == lengths.maximum
    assert 0.9 * lengths.mean < np.mean(drawn) < lengths.mean


def test_sigma_zero_makes_all_equal() -> None:
    assert set(LengthDistribution(mean=64, sigma=0, maximum=256).draw(np.random.default_rng(5), 50)) == {64}


def test_same_seed_same_requests_and_longer_runs_begin_alike() -> None:
    workload = SyntheticWorkload()
    requests = workload.requests(20, seed=3)
    assert requests == workload.requests(20, seed=3)
    assert [r.max_tokens for r in workload.requests(40, seed=3)[:20]] == [r.max_tokens for r in requests]
    assert requests != workload.requests(20, seed=4)


def test_token_ids_stay_in_their_range() -> None:
    requests = SyntheticWorkload(vocab_size=110, first_token_id=100).requests(30, seed=0)
    token_ids = {token for request in requests for token in request.prompt}
    assert token_ids == set(range(100, 110))


def test_default_number_of_requests() -> None:
    assert [default_num_requests(c) for c in (1, 6, 8, 32, 33, 128)] == [48, 48, 64, 256, 256, 512]


def test_arrivals_are_poisson() -> None:
    arrivals = poisson_arrivals_s(5.0, 20_000, seed=0)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert np.std(gaps) == pytest.approx(0.2, rel=0.03)
    assert poisson_arrivals_s(5.0, 0, seed=0) == []


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_rates_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="request rate"):
        poisson_arrivals_s(rate, 3, seed=0)


def test_bad_distributions_are_refused() -> None:
    with pytest.raises(ConfigError, match="1..256"):
        LengthDistribution(mean=300, sigma=0.9, maximum=256)
    with pytest.raises(ConfigError, match="sigma"):
        LengthDistribution(mean=30, sigma=float("nan"), maximum=256)
    with pytest.raises(ConfigError, match="vocabulary of 50"):
        SyntheticWorkload(vocab_size=50)


def test_jsonl_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello", "max_tokens": 3}\n\n{"prompt": [1, 2, 3]}\n')
    assert load_requests(path, 9) == [BenchRequest("Hello", 3), BenchRequest((1, 2, 3), 9)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "not an object"),
        ('{"prompt": "a", "max_new_tokens": 3}', "unknown field 'max_new_tokens'"),
        ('{"prompt": ""}', "non-empty"),
        ('{"prompt": [1, -2]}', "non-empty list of token ids"),
        ('{"prompt": [true]}', "non-empty list of token ids"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        ("", "holds no prompts"),
    ],
)
def test_bad_jsonl_is_named_by_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        load_requests(path, 9)


def test_missing_prompts_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_requests(tmp_path / "none.jsonl", 9)
