"""The quick form of the numerics gates (`make evidence-numerics` is the whole): native against transformers in float32.

192 tokens each of prose, dialogue and code, the default file; the goldens hold the likeliest tokens' log-probabilities.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ropeway.backends.native import NativeBackend
from ropeway.model.loading import load_model
from support.divergence import Divergence, log_softmax, lumped_kl
from support.forward_batches import all_logits
from support.goldens import NUMERICS_WINDOW, golden

TEXT_NAMES = ("prose", "dialogue", "code")


@pytest.fixture(scope="module")
def native(model_path: Path) -> NativeBackend:
    model = load_model(model_path)
    return NativeBackend(model.program, model.tensors, num_kv_blocks=NUMERICS_WINDOW // 16)


def measure(native: NativeBackend, text: str) -> Divergence:
    expected = {name: array for name, array in golden("default_numerics").items() if name.startswith(text)}
    token_ids = expected[f"{text}_token_ids"].tolist()
    top_ids = expected[f"{text}_top_ids"].astype(np.int64)
    top_logprobs = expected[f"{text}_top_logprobs"].astype(np.float64)
    actual = log_softmax(all_logits(native, token_ids))
    nexts = np.arange(len(token_ids) - 1), np.asarray(token_ids[1:])
    return Divergence(
        num_positions=len(token_ids),
        num_agreeing=int((actual.argmax(axis=1) == top_ids[:, 0]).sum()),
        kl_sum=lumped_kl(top_logprobs, np.take_along_axis(actual, top_ids, axis=1)),
        num_predicted=len(token_ids) - 1,
        expected_surprise=float(-expected[f"{text}_next_logprobs"].sum(dtype=np.float64)),
        actual_surprise=float(-actual[nexts].sum()),
    )


def test_default_model(native: NativeBackend) -> None:
    """The gates over the three texts together (top-1 0.974, perplexity -0.15 %), and twice their KL (0.0010)."""
    measured = {text: measure(native, text) for text in TEXT_NAMES}
    total = sum(measured.values(), Divergence())
    assert total.num_positions == len(TEXT_NAMES) * NUMERICS_WINDOW
    assert total.top1_agreement >= 0.965, measured
    assert total.mean_kl <= 0.002, measured
    assert abs(total.perplexity_change) <= 0.006, measured
