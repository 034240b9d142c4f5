"""What the oracle (`make oracle`) and the tests agree on about the goldens: where they are, and of what."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from ropeway.model.weights import TensorType
from support.random_gguf import ODD_MODEL, RandomModel

GOLDENS_DIR = Path(__file__).parent.parent / "goldens"

GOLDEN_MODELS = {
    "plain": RandomModel(),
    "odd": ODD_MODEL,
    "q4_1": RandomModel(
        weight_type=TensorType.Q4_1, head_type=TensorType.Q8_0, num_kv_heads=1, rope_base=500.0, seed=3
    ),
    "scaled": RandomModel(
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, has_bias=True, seed=4
    ),
}

NUM_TOP_LOGITS = 16
LOGIT_STRIDE = 997  # kept beside the top ones, so that a wrong row of the head has little room to hide
NUMERICS_WINDOW = 192  # tokens of each text in the quick form of the numerics gates
NUM_TOP_LOGPROBS = 32


def golden(name: str) -> dict[str, np.ndarray]:
    """The committed arrays of one golden."""
    with np.load(GOLDENS_DIR / f"{name}.npz") as file:
        return dict(file)


def file_digest(path: Path) -> np.ndarray:
    """SHA-256 of a file as uint8[32]: whether a random model is the one that its golden was made from."""
    return np.frombuffer(hashlib.sha256(path.read_bytes()).digest(), np.uint8)
