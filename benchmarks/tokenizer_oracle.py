"""What llama.cpp makes of the strings in `tests/support/tokenizer_strings.py`, for the goldens of the tests.

Part of `make oracle`. By itself, with the packages of `tokenizer-oracle-requirements.txt` and `PYTHONPATH=src:tests`:

    python benchmarks/tokenizer_oracle.py [--write] [--vocabulary ggml-vocab-qwen2.gguf …]

Two goldens. `smollm2_tokens.json.gz`: ids of every string for the default model, with special tokens parsed and not.
`pre_tokenizers.json.gz`: for every pre-tokenizer name in our table, a checksum of the ids of each string under one made
vocabulary, whose merges were learned without any pre-tokenizer, so that they cross every boundary and each cut in a
different place gives different ids. `--vocabulary` compares real vocabularies, which are too large to keep, and stores
nothing. Differences between llama.cpp and Ropeway, or from the stored goldens, are printed; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import xllamacpp

from ropeway.catalog import resolve_model
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


def default_model_golden(model: Path, strings: list[str], *, write: bool) -> int:
    with llama_cpp(model) as oracle:
        parsed = [oracle.token_ids(text) for text in strings]
        plain = [oracle.token_ids(text, parse_special=False) for text in strings]
    plain_where_it_differs = {str(index): ids for index, ids in enumerate(plain) if ids != parsed[index]}
    contents: dict[str, object] = {"parsed": parsed, "plain": plain_where_it_differs}
    num_wrong = golden_differs("smollm2_tokens", strings, contents, write=write)
    tokenizer = Tokenizer.from_metadata(GgufFile.open(model).metadata)
    num_wrong += differences("default model, special tokens parsed", tokenizer, strings, parsed)
    return num_wrong + differences("default model, plain text", tokenizer, strings, plain, parse_special=False)


def pre_tokenizer_golden(strings: list[str], *, write: bool) -> int:
    merges, whole_words = boundary_blind_merges(strings)
    num_wrong = 0
    rows: dict[str, list[str]] = {}  # checksums of all strings, joined -> the names that give them
    for name in sorted(PRE_TOKENIZERS):
        metadata = boundary_blind_metadata(name, merges, whole_words)
        with llama_cpp_with_tokenizer(metadata) as oracle:
            ids = [oracle.token_ids(text) for text in strings]
        rows.setdefault("".join(map(ids_checksum, ids)), []).append(name)
        num_wrong += differences(f"pre-tokenizer {name}", Tokenizer.from_metadata(metadata), strings, ids)
    contents: dict[str, object] = {
        "merges": merges,
        "whole_words": whole_words,
        "names": list(rows.values()),
        "checksums": list(rows),
    }
    return num_wrong + golden_differs("pre_tokenizers", strings, contents, write=write)


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


def golden_differs(name: str, strings: Sequence[str], contents: dict[str, object], *, write: bool) -> int:
    """Stores a golden, or compares it with the stored one; returns 1 where it differs."""
    header = {"source": f"xllamacpp {xllamacpp.__version__}", "num_strings": len(strings), "strings": digest(strings)}
    path = GOLDENS / f"{name}.json.gz"
    if not write:
        stored = json.loads(gzip.decompress(path.read_bytes()))
        changed = [key for key, value in (header | contents).items() if key != "source" and stored.get(key) != value]
        print(f"{path.name}: {'as stored' if not changed else 'differs from the stored one in ' + ', '.join(changed)}")
        return len(changed)
    text = json.dumps(header | contents, ensure_ascii=False, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{path.name}: {path.stat().st_size} bytes written", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Derive the goldens of the tokenizer tests with llama.cpp's tokenizer."
    )
    parser.add_argument("--write", action="store_true", help="replace the stored goldens instead of comparing")
    parser.add_argument(
        "--vocabulary", type=Path, nargs="*", default=[], help="compare these GGUF files, and only them"
    )
    options = parser.parse_args()
    strings = tokenizer_strings()
    if options.vocabulary:
        num_wrong = sum(real_vocabulary(path, strings) for path in options.vocabulary)
    else:
        model = resolve_model(os.environ.get("ROPEWAY_MODEL_FILE", "smollm2"))
        num_wrong = default_model_golden(model, strings, write=options.write)
        num_wrong += pre_tokenizer_golden(strings[:NUM_PRE_TOKENIZER_STRINGS], write=options.write)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
