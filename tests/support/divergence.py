"""How far one model's predictions are from another's: top-1 agreement, Kullback-Leibler divergence, perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Float64Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Sums over positions of a text, so that windows and texts add up. Natural logarithms.

    num_agreeing: positions whose likeliest token is the same. kl_sum: of KL(expected || actual).
    num_predicted: positions whose next token the text gives; the surprises are sums of -log p(next token).
    """

    num_positions: int = 0
    num_agreeing: int = 0
    kl_sum: float = 0.0
    num_predicted: int = 0
    expected_surprise: float = 0.0
    actual_surprise: float = 0.0

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(
            self.num_positions + other.num_positions,
            self.num_agreeing + other.num_agreeing,
            self.kl_sum + other.kl_sum,
            self.num_predicted + other.num_predicted,
            self.expected_surprise + other.expected_surprise,
            self.actual_surprise + other.actual_surprise,
        )

    @property
    def top1_agreement(self) -> float:
        return self.num_agreeing / self.num_positions

    @property
    def mean_kl(self) -> float:
        return self.kl_sum / self.num_positions

    @property
    def expected_perplexity(self) -> float:
        return math.exp(self.expected_surprise / self.num_predicted)

    @property
    def perplexity_change(self) -> float:
        """actual / expected - 1."""
        return math.exp((self.actual_surprise - self.expected_surprise) / self.num_predicted) - 1


def log_softmax(logits: np.ndarray) -> Float64Array:
    """Log-probabilities of each row, in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    normed: Float64Array = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return normed


def divergence(expected: Float64Array, actual: Float64Array, token_ids: Sequence[int]) -> Divergence:
    """Between log-probabilities[T, vocab] after each of token_ids[T]; every token counts."""
    nexts = np.arange(len(token_ids) - 1), np.asarray(token_ids[1:])
    return Divergence(
        num_positions=len(token_ids),
        num_agreeing=int((expected.argmax(axis=1) == actual.argmax(axis=1)).sum()),
        kl_sum=float((np.exp(expected) * (expected - actual)).sum()),
        num_predicted=len(token_ids) - 1,
        expected_surprise=float(-expected[nexts].sum()),
        actual_surprise=float(-actual[nexts].sum()),
    )


def lumped_kl(expected: Float64Array, actual: Float64Array) -> float:
    """KL(expected || actual) summed over rows of log-probabilities of some tokens[T, N], all others lumped into one
    event.

    At most the divergence over the whole vocabulary (the log-sum inequality), and comparable wherever the same tokens
    are kept.
    """
    kept = (np.exp(expected) * (expected - actual)).sum()
    rest, actual_rest = (np.maximum(1 - np.exp(part).sum(axis=1), 1e-12) for part in (expected, actual))
    return float(kept + (rest * np.log(rest / actual_rest)).sum())
