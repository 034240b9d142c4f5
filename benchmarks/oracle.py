"""Goldens from Hugging Face transformers: `LlamaForCausalLM` in float32 over the dequantised weights of a GGUF file.

Run by `make oracle`, in an environment of its own that has torch and transformers. Without flags it derives every
golden again and compares it with the committed one; `--write` replaces the committed files.

The weights go from GGUF's layout to transformers': the rows of q and k are un-permuted, so that rope's pairs lie half a
head apart. All else (norms, rope and its scaling, attention, the feed-forward) is transformers' own code.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from ropeway.catalog import resolve_model
from ropeway.model.loading import Model, load_model
from ropeway.model.weights import dequantize
from ropeway.text.tokenizer import Tokenizer
from support.goldens import (
    GOLDEN_MODELS,
    GOLDENS_DIR,
    LOGIT_STRIDE,
    NUM_TOP_LOGITS,
    NUM_TOP_LOGPROBS,
    NUMERICS_WINDOW,
    file_digest,
)
from support.random_gguf import write_random_gguf

TEXTS_DIR = Path(__file__).parent / "texts"
TEXT_NAMES = ("prose", "dialogue", "code")
TOLERANCE = 1e-5  # of a re-derived golden, relative to its largest value: torch's own sums differ between machines

PROMPTS = (
    "The ropeway carries its cabins over the valley at a steady pace, and",
    'def mean(values):\n    """The arithmetic mean."""\n    return sum(values)',
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 東京は日本の首都です。 2 + 2 = 4",
)

Arrays = Mapping[str, np.ndarray]


class Oracle:
    """One model file as transformers sees it."""

    def __init__(self, model: Model) -> None:
        config = model.config
        self._hf = transformers.LlamaForCausalLM(_hf_config(model)).to(torch.float32).eval()
        state = {_hf_name(name): torch.from_numpy(dequantize(tensor)) for name, tensor in model.tensors.items()
                 if name != "rope_freqs.weight"}  # fmt: skip
        for name in state:
            if ".q_proj." in name or ".k_proj." in name:
                state[name] = _unpermute(state[name], config.head_dim)
        missing, unexpected = self._hf.load_state_dict(state, strict=False)
        # Biases that the file lacks stay zero, and a tied head is the embedding; anything else missing is a mistake
        # here.
        left = [name for name in missing if not name.endswith(".bias") and name != "lm_head.weight"]
        if left or unexpected:
            raise AssertionError(f"not loaded: {left}; unexpected: {unexpected}")
        for name in missing:
            if name.endswith(".bias"):
                torch.nn.init.zeros_(self._hf.get_parameter(name))
        self._set_rope(model)

    def _set_rope(self, model: Model) -> None:
        """What transformers' Llama cannot say: frequency factors; a rope over part of a head (the rest turn by 0)."""
        config = model.config
        if "rope_freqs.weight" not in model.tensors and config.rotary_dim == config.head_dim:
            return
        frequencies = torch.zeros(config.head_dim // 2)
        turned = 1.0 / config.rope_base ** (torch.arange(0, config.rotary_dim, 2).double() / config.rotary_dim)
        if "rope_freqs.weight" in model.tensors:
            turned /= torch.from_numpy(dequantize(model.tensors["rope_freqs.weight"])).double()
        frequencies[: config.rotary_dim // 2] = turned.float()
        self._hf.model.rotary_emb.inv_freq = frequencies

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """logits[T, vocab] after each token."""
        with torch.inference_mode():
            return self._hf(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


def _hf_config(model: Model) -> transformers.LlamaConfig:
    config = model.config
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_base}
    if config.rope_factor != 1.0:
        rope |= {"rope_type": "linear", "factor": config.rope_factor}
    has_bias = any(name.endswith(".bias") for name in model.tensors)
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        attention_bias=has_bias,
        mlp_bias=has_bias,
        tie_word_embeddings="output.weight" not in model.tensors,
        attn_implementation="eager",
    )


_HF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HF_WHOLES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _hf_name(name: str) -> str:
    """transformers' name of a GGUF tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in _HF_WHOLES:
        return f"{_HF_WHOLES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_HF_PARTS[part]}.{kind}"


def _unpermute(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from pairs side by side (2i, 2i + 1) to pairs half a head apart (i, i + head_dim / 2)."""
    heads = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)


def random_model_goldens(directory: Path) -> dict[str, Arrays]:
    """Every logit of a few tokens, per random model."""
    goldens = {}
    for name, shape in GOLDEN_MODELS.items():
        path = write_random_gguf(directory / f"{name}.gguf", shape)
        token_ids = np.random.default_rng(shape.seed).integers(0, shape.vocab_size, 20).astype(np.int32)
        logits = Oracle(load_model(path)).logits(token_ids.tolist())
        goldens[f"random_{name}"] = {"digest": file_digest(path), "token_ids": token_ids, "logits": logits}
    return goldens


def default_model_goldens(oracle: Oracle, tokenizer: Tokenizer) -> Arrays:
    """Per position of the prompts: the top logits, every LOGIT_STRIDE-th, the largest magnitude and the sum."""
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    logits = np.concatenate([oracle.logits(prompt) for prompt in prompts])
    top_ids = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_TOP_LOGITS]
    return {
        "token_ids": np.concatenate(prompts).astype(np.int32),
        "prompt_indptr": np.cumsum([0, *map(len, prompts)]).astype(np.int32),
        "top_ids": top_ids.astype(np.uint16),
        "top_logits": np.take_along_axis(logits, top_ids, axis=1),
        "strided_logits": logits[:, ::LOGIT_STRIDE].copy(),
        "max_abs": np.abs(logits).max(axis=1),
        "sum": logits.sum(axis=1, dtype=np.float64),
    }


def numerics_goldens(oracle: Oracle, tokenizer: Tokenizer) -> Arrays:
    """Per position of the first NUMERICS_WINDOW tokens of each text: top log-probabilities, the next token's."""
    arrays: dict[str, np.ndarray] = {}
    for name in TEXT_NAMES:
        text = (TEXTS_DIR / f"{name}.txt").read_text(encoding="utf-8")
        token_ids = tokenizer.encode(text)[:NUMERICS_WINDOW]
        logits = oracle.logits(token_ids).astype(np.float64)
        logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        top_ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :NUM_TOP_LOGPROBS]
        arrays |= {
            f"{name}_token_ids": np.array(token_ids, np.int32),
            f"{name}_top_ids": top_ids.astype(np.uint16),
            f"{name}_top_logprobs": np.take_along_axis(logprobs, top_ids, axis=1).astype(np.float32),
            f"{name}_next_logprobs": logprobs[np.arange(len(token_ids) - 1), token_ids[1:]].astype(np.float32),
        }
    return arrays


def disagreements(name: str, derived: Arrays) -> list[str]:
    """What differs from the committed golden: integers at all, floats by more than TOLERANCE of the largest value."""
    with np.load(GOLDENS_DIR / f"{name}.npz") as file:
        committed = dict(file)
    if committed.keys() != derived.keys():
        return [f"{name}: has {sorted(committed)}, derived {sorted(derived)}"]
    found = []
    for key, array in derived.items():
        # Which of two equal logits comes first is not worth a failure: their values are compared.
        if key.endswith("top_ids"):
            continue
        if array.shape != committed[key].shape:
            found.append(f"{name}.{key}: shape {committed[key].shape}, derived {array.shape}")
        elif np.issubdtype(array.dtype, np.floating):
            error = float(np.abs(array - committed[key]).max() / np.abs(array).max())
            print(f"{name}.{key}: relative difference {error:.1e}")
            if not error <= TOLERANCE:
                found.append(f"{name}.{key}: relative difference {error:.1e}, allowed {TOLERANCE:.0e}")
        elif not np.array_equal(array, committed[key]):
            found.append(f"{name}.{key}: differs")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Derive the goldens from transformers, and compare them.")
    parser.add_argument("--write", action="store_true", help="replace the committed goldens")
    parser.add_argument("--model", default="smollm2", help="name or path of the default model (default: smollm2)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        goldens = random_model_goldens(Path(directory))
    model = load_model(resolve_model(arguments.model))
    oracle, tokenizer = Oracle(model), Tokenizer.from_metadata(model.metadata)
    goldens["default_logits"] = default_model_goldens(oracle, tokenizer)
    goldens["default_numerics"] = numerics_goldens(oracle, tokenizer)
    if arguments.write:
        for name, arrays in goldens.items():
            np.savez_compressed(GOLDENS_DIR / f"{name}.npz", **arrays)
            print(f"wrote {name}.npz, {(GOLDENS_DIR / f'{name}.npz').stat().st_size} bytes")
        return 0
    problems = [problem for name, arrays in goldens.items() for problem in disagreements(name, arrays)]
    print(*problems, sep="\n", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
