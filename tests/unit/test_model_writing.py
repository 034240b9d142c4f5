"""The quantisers and the divergences that the tests and benchmarks rest on."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ropeway.model.weights import Tensor, TensorType, dequantize
from support.divergence import Divergence, divergence, log_softmax, lumped_kl
from support.random_gguf import RandomModel, quantize, write_random_gguf

VALUES = np.random.default_rng(5).standard_normal((7, 96), np.float32)
# Of a block: half a step, where the steps divide the block's range (Q4_0: its extreme by 8 steps; the far side may be
# cut by one).
HALF_STEP = {
    TensorType.Q8_0: lambda block: np.abs(block).max() / 127 / 2,
    TensorType.Q4_0: lambda block: np.abs(block).max() / 8,
    TensorType.Q4_1: lambda block: (block.max() - block.min()) / 15 / 2,
}


def stored(values: np.ndarray, tensor_type: TensorType) -> np.ndarray:
    return dequantize(Tensor("t", tensor_type, values.shape, quantize(values, tensor_type)))


@pytest.mark.parametrize("tensor_type", HALF_STEP)
def test_quantised_values_are_within_half_a_step(tensor_type: TensorType) -> None:
    for block, back in zip(VALUES.reshape(-1, 32), stored(VALUES, tensor_type).reshape(-1, 32), strict=True):
        # Scale and minimum are stored as f16: 2^-11 of the largest value beside the half step.
        assert np.abs(block - back).max() <= HALF_STEP[tensor_type](block) + np.abs(block).max() * 2**-10


@pytest.mark.parametrize("tensor_type", TensorType)
def test_storing_what_was_stored_changes_nothing(tensor_type: TensorType) -> None:
    once = stored(VALUES, tensor_type)
    assert np.abs(stored(once, tensor_type) - once).max() <= np.abs(once).max() * 2**-10


@pytest.mark.parametrize("tensor_type", TensorType)
def test_zeros(tensor_type: TensorType) -> None:
    assert not stored(np.zeros((2, 64), np.float32), tensor_type).any()


def test_half_floats_round_to_nearest() -> None:
    assert np.array_equal(stored(VALUES, TensorType.F32), VALUES)
    assert (
        np.abs(stored(VALUES, TensorType.F16) - VALUES) <= np.abs(VALUES) * 2**-11 + 2**-25
    ).all()  # 2^-25: subnormals
    assert (np.abs(stored(VALUES, TensorType.BF16) - VALUES) <= np.abs(VALUES) * 2**-8).all()
    tie = np.array([[1 + 2**-8, 1 + 3 * 2**-8]], np.float32)  # to even: down, up
    assert stored(tie, TensorType.BF16).tolist() == [[1.0, 1 + 2**-6]]


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    first, second, other = (
        write_random_gguf(tmp_path / name, RandomModel(seed=seed)).read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == second
    assert first != other


class TestDivergence:
    EXPECTED = log_softmax(np.array([[0.0, math.log(3.0)], [5.0, 5.0 + math.log(3.0)]]))
    ACTUAL = log_softmax(np.array([[0.0, 0.0], [0.0, math.log(3.0)]]))

    def test_sums(self) -> None:
        """p = (1/4, 3/4) against (1/2, 1/2) at the first position, equal at the second; token 1 follows the first."""
        total = divergence(self.EXPECTED, self.ACTUAL, [0, 1])
        expected_kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
        assert total.num_agreeing == 1
        assert total.kl_sum == pytest.approx(expected_kl)
        assert total.expected_perplexity == pytest.approx(4 / 3)
        assert total.perplexity_change == pytest.approx(0.75 / 0.5 - 1)
        twice = total + total
        assert twice.mean_kl == pytest.approx(total.mean_kl)
        assert twice.top1_agreement == total.top1_agreement == 0.5

    def test_lumping_never_adds(self) -> None:
        rng = np.random.default_rng(0)
        expected, actual = log_softmax(rng.standard_normal((9, 50))), log_softmax(rng.standard_normal((9, 50)))
        whole = divergence(expected, actual, [0] * 9).kl_sum
        parts = [lumped_kl(expected[:, :kept], actual[:, :kept]) for kept in (1, 10, 30, 49)]
        assert 0 < parts[0] < parts[1] < parts[2] < parts[3] <= whole
        assert parts[3] == pytest.approx(whole)
        assert Divergence() + Divergence() == Divergence()
