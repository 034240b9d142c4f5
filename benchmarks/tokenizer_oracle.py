"""What llama.cpp makes of the strings in `tests/support/tokenizer_strings.py`, for the goldens of the tests.

Run with the packages of `benchmarks/requirements-tokenizer-oracle.txt` and `PYTHONPATH=src:tests`:

    python benchmarks/tokenizer_oracle.py --model SmolLM2-135M-Instruct.Q4_1.gguf [--vocabulary ggml-vocab-qwen2.gguf …]

Two goldens. `smollm2_tokens.json.gz`: ids of every string for the default model, with special tokens parsed and not.
`pre_tokenizers.json.gz`: for every pre-tokenizer name in our table, a checksum of the ids of each string under one made
vocabulary, whose merges were learned without any pre-tokenizer, so that they cross every boundary and each cut in a
different place gives different ids. `--vocabulary` compares real vocabularies, which are too large to keep, and stores
nothing. Differences between llama.cpp and Ropeway are printed, and the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import xllamacpp

from ropeway.model.gguf import GgufFile
from ropeway.text.pre_tokenizers import PRE_TOKENIZERS
from ropeway.text.tokenizer import Tokenizer
from support.random_gguf import RandomModel, write_random_gguf
from support.tokenizer_strings import boundary_blind_metadata, digest, ids_checksum, tokenizer_strings

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
NUM_PRE_TOKENIZER_STRINGS = 800
NUM_MERGES = 1500


class LlamaCpp:
    """llama.cpp's server with one model, asked for nothing but tokens."""

    def __init__(self, server: Any) -> None:
        self._url = f"{server.listening_address}/tokenize"

    def token_ids(self, text: str, *, parse_special: bool = True) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": parse_special}).encode()
        request = urllib.request.Request(self._url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            ids: list[int] = json.load(response)["tokens"]
        return ids


@contextmanager
def llama_cpp(model: Path) -> Iterator[LlamaCpp]:
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = 128
    params.n_parallel = 1
    params.warmup = False
    params.port = 0
    server = xllamacpp.Server(params)
    try:
        yield LlamaCpp(server)
    finally:
        del server


@contextmanager
def llama_cpp_with_tokenizer(metadata: dict[str, object]) -> Iterator[LlamaCpp]:
    """A vocabulary needs a model to be loaded with: a tiny one of random weights."""
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    model = RandomModel(num_layers=1, hidden_size=32, head_dim=8, vocab_size=len(tokens), metadata=metadata)
    with tempfile.TemporaryDirectory() as folder:
        path = write_random_gguf(Path(folder) / "model.gguf", model)
        with llama_cpp(path) as oracle:
            yield oracle


def differences(
    name: str, tokenizer: Tokenizer, strings: Sequence[str], ids: Sequence[Sequence[int]], **how: bool
) -> int:
    """Prints the first few strings whose ids are not llama.cpp's; returns how many there are."""
    wrong = []
    for text, expected in zip(strings, ids, strict=True):
        found = tokenizer.encode(text, add_bos=False, **how)
        if found != list(expected):
            wrong.append((text, expected, found))
    print(f"{name}: {len(strings)} strings, {len(wrong)} differ", flush=True)
    for text, expected, found in wrong[:5]:
        print(f"  {text!r}\n    llama.cpp {expected}\n    ropeway   {found}")
    return len(wrong)


def default_model_golden(model: Path, strings: list[str]) -> int:
    with llama_cpp(model) as oracle:
        parsed = [oracle.token_ids(text) for text in strings]
        plain = [oracle.token_ids(text, parse_special=False) for text in strings]
    write_golden(
        "smollm2_tokens",
        strings,
        {
            "parsed": parsed,
            "plain": {
                str(index): ids for index, ids in enumerate(plain) if ids != parsed[index]
            },  # only where it differs
        },
    )
    tokenizer = Tokenizer.from_metadata(GgufFile.open(model).metadata)
    num_wrong = differences("default model, special tokens parsed", tokenizer, strings, parsed)
    return num_wrong + differences("default model, plain text", tokenizer, strings, plain, parse_special=False)


def pre_tokenizer_golden(strings: list[str]) -> int:
    merges, whole_words = boundary_blind_merges(strings)
    num_wrong = 0
    rows: dict[str, list[str]] = {}  # checksums of all strings, joined -> the names that give them
    for name in sorted(PRE_TOKENIZERS):
        metadata = boundary_blind_metadata(name, merges, whole_words)
        with llama_cpp_with_tokenizer(metadata) as oracle:
            ids = [oracle.token_ids(text) for text in strings]
        rows.setdefault("".join(map(ids_checksum, ids)), []).append(name)
        num_wrong += differences(f"pre-tokenizer {name}", Tokenizer.from_metadata(metadata), strings, ids)
    contents = {
        "merges": merges,
        "whole_words": whole_words,
        "names": list(rows.values()),
        "checksums": list(rows),
    }
    write_golden("pre_tokenizers", strings, contents)
    return num_wrong


def boundary_blind_merges(strings: list[str]) -> tuple[list[str], list[str]]:
    """Merges learned from the strings uncut, and words in the vocabulary that no merges lead to."""
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
        max_token_length=12,
    )
    texts = [text for text in strings if "<" not in text]  # or the special tokens would be learned
    learner.train_from_iterator([text for text in texts for _ in range(2)], trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    words = {word for text in texts for word in text.split(" ") if word.isascii() and word.isalpha() and len(word) > 4}
    candidates = [spelling for word in sorted(words) for spelling in (word, f"Ġ{word}")]
    return merges, [spelling for spelling in candidates if spelling not in model["vocab"]][::3]


def real_vocabulary(path: Path, strings: list[str]) -> int:
    metadata = GgufFile.open(path).metadata
    metadata = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    with llama_cpp_with_tokenizer(metadata) as oracle:
        ids = [oracle.token_ids(text) for text in strings]
    return differences(path.name, Tokenizer.from_metadata(metadata), strings, ids)


def write_golden(name: str, strings: Sequence[str], contents: dict[str, object]) -> None:
    header = {"source": f"xllamacpp {xllamacpp.__version__}", "num_strings": len(strings), "strings": digest(strings)}
    text = json.dumps(header | contents, ensure_ascii=False, separators=(",", ":"))
    path = GOLDENS / f"{name}.json.gz"
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{path.name}: {path.stat().st_size} bytes", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the goldens of the tokenizer tests with llama.cpp's tokenizer.")
    parser.add_argument("--model", type=Path, help="the default model; without it, its golden is not written")
    parser.add_argument("--pre-tokenizers", action="store_true", help="write the golden of the pre-tokenizer table")
    parser.add_argument("--vocabulary", type=Path, nargs="*", default=[], help="GGUF files to compare, storing nothing")
    options = parser.parse_args()
    strings = tokenizer_strings()
    num_wrong = 0
    if options.model:
        num_wrong += default_model_golden(options.model, strings)
    if options.pre_tokenizers:
        num_wrong += pre_tokenizer_golden(strings[:NUM_PRE_TOKENIZER_STRINGS])
    for path in options.vocabulary:
        num_wrong += real_vocabulary(path, strings)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
