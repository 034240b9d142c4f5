"""How each pre-tokenizer named by a GGUF file (`tokenizer.ggml.pre`) cuts text into words before byte-pair merging.

Owns the table of names. Each entry was compared, id by id, with llama.cpp (`benchmarks/tokenizer_oracle.py`): a
name that was not compared is not in the table, because a model fed with almost the right tokens answers almost
sensibly. Knows no vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenizerSpec:
    """One way of cutting text into words.

    patterns: regular expressions, each applied within the pieces that the one before it left; both what matches
        and what
        lies between matches become pieces.
    merges_are_skipped: a word that is itself in the vocabulary is one token, whatever its merges would give.
    adds_bos: the default where the file has no `tokenizer.ggml.add_bos_token`.
    """

    patterns: tuple[str, ...]
    merges_are_skipped: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer, which also maps bytes to the printable alphabet of byte-level BPE (GPT-2, Radford et
        al. 2019).
        """
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _any_of(*alternatives: str) -> str:
    return "|".join(alternatives)


_SPACES = (r"\s+(?!\S)", r"\s+")  # all but the last space before a word; the last one when no word takes it
_LINE_BREAKS = r"\s*[\r\n]+"
_CONTRACTIONS = "'(?:[sdmt]|ll|ve|re)"
_CONTRACTIONS_ANY_CASE = "'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
_LETTERS_AFTER_ANY = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_TO_LINE_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = _any_of(_CONTRACTIONS, r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", *_SPACES)


def _gpt4_like(digits: str) -> str:
    return _any_of(_CONTRACTIONS_ANY_CASE, _LETTERS_AFTER_ANY, digits, _SYMBOLS_TO_LINE_END, _LINE_BREAKS, *_SPACES)


_GPT2_SPEC = PreTokenizerSpec((_GPT2,))
_DIGITS_THEN_GPT2_SPEC = PreTokenizerSpec((r"\p{N}", _GPT2))
_LLAMA3_SPEC = PreTokenizerSpec((_gpt4_like(r"\p{N}{1,3}"),), merges_are_skipped=True, adds_bos=True)
_UP_TO_THREE_DIGITS_SPEC = PreTokenizerSpec((_gpt4_like(r"\p{N}{1,3}"),))
_QWEN2_SPEC = PreTokenizerSpec((_gpt4_like(r"\p{N}"),))
_QWEN35_SPEC = PreTokenizerSpec(
    (
        _any_of(
            _CONTRACTIONS_ANY_CASE,
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            _LINE_BREAKS,
            *_SPACES,
        ),
    )
)
_FALCON_SPEC = PreTokenizerSpec((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"))
_DEFAULT_SPEC = PreTokenizerSpec((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"))

PRE_TOKENIZERS: dict[str, PreTokenizerSpec] = {
    "default": _DEFAULT_SPEC,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"), _GPT2_SPEC),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_THEN_GPT2_SPEC
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3_SPEC),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _UP_TO_THREE_DIGITS_SPEC),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2_SPEC),
    "qwen35": _QWEN35_SPEC,
    "falcon": _FALCON_SPEC,
}
