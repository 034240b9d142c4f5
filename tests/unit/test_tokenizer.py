"""The tokenizer: the same ids as llama.cpp, special tokens, BOS, end tokens, bytes, and metadata that is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropeway.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from ropeway.model.gguf import GgufFile
from ropeway.text.pre_tokenizers import PRE_TOKENIZERS
from ropeway.text.tokenizer import Tokenizer
from support.tokenizer_strings import boundary_blind_metadata, digest, ids_checksum, tokenizer_strings

GOLDENS = Path(__file__).parent.parent / "goldens"


def golden(name: str) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads(gzip.decompress((GOLDENS / f"{name}.json.gz").read_bytes()))
    return contents


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(GgufFile.open(model_path).metadata)


def small_metadata(**changes: Any) -> dict[str, object]:
    """Bytes, a few words, control tokens 0..2 (`<|endoftext|>`, `<|im_start|>`, `<|im_end|>`); None removes a key."""
    metadata = boundary_blind_metadata("gpt-2", ["h e", "l l", "he ll", "Ġ t"], [])
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
    return metadata


def with_tokens(*texts_and_kinds: tuple[str, int], **changes: Any) -> dict[str, object]:
    metadata = small_metadata(**changes)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(kinds, np.ndarray)
    metadata["tokenizer.ggml.tokens"] = tokens + [text for text, _ in texts_and_kinds]
    metadata["tokenizer.ggml.token_type"] = np.append(kinds, [kind for _, kind in texts_and_kinds]).astype(np.int32)
    return metadata


# The same as llama.cpp


def test_default_model_gives_the_ids_of_llama_cpp(tokenizer: Tokenizer) -> None:
    record = golden("smollm2_tokens")
    strings = tokenizer_strings(record["num_strings"])
    assert digest(strings) == record["strings"], "the strings changed: run benchmarks/tokenizer_oracle.py again"
    assert len(strings) >= 2000
    plain = {int(index): ids for index, ids in record["plain"].items()}
    assert len(plain) >= 100  # strings that hold special tokens
    for index, (text, parsed) in enumerate(zip(strings, record["parsed"], strict=True)):
        assert tokenizer.encode(text) == parsed, text
        assert tokenizer.encode(text, parse_special=False) == plain.get(index, parsed), text


def test_every_pre_tokenizer_cuts_as_llama_cpp_does() -> None:
    record = golden("pre_tokenizers")
    strings = tokenizer_strings(record["num_strings"])
    assert digest(strings) == record["strings"], "the strings changed: run benchmarks/tokenizer_oracle.py again"
    assert sorted(name for names in record["names"] for name in names) == sorted(PRE_TOKENIZERS)
    for names, checksums in zip(record["names"], record["checksums"], strict=True):
        for name in names[:1] if len({PRE_TOKENIZERS[name] for name in names}) == 1 else names:
            metadata = boundary_blind_metadata(name, record["merges"], record["whole_words"])
            tokenizer = Tokenizer.from_metadata(metadata)
            for index, text in enumerate(strings):
                checksum = ids_checksum(tokenizer.encode(text, add_bos=False))
                assert checksum == checksums[8 * index : 8 * index + 8], f"{name}: {text!r}"


def test_the_golden_tells_pre_tokenizers_apart() -> None:
    record = golden("pre_tokenizers")
    patterns_by_row = [{PRE_TOKENIZERS[name].patterns for name in names} for names in record["names"]]
    assert all(len(patterns) == 1 for patterns in patterns_by_row)
    assert len(record["checksums"]) == len({(s.patterns, s.merges_are_skipped) for s in PRE_TOKENIZERS.values()})


def test_decode_gives_the_text_back(tokenizer: Tokenizer) -> None:
    known = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    missing = {byte for byte in range(256) if bytes([byte]) not in known}
    num_round_trips = 0
    for text in tokenizer_strings():
        if not missing & set(text.encode()):
            assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
            num_round_trips += 1
    assert num_round_trips > 2000


# Special tokens and BOS


def test_control_tokens_are_parsed_only_when_asked(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user") == [1, *tokenizer.encode("user")]
    plain = tokenizer.encode("<|im_start|>user", parse_special=False)
    assert 1 not in plain
    assert tokenizer.decode(plain) == "<|im_start|>user"


def test_user_defined_tokens_are_always_whole_and_shown() -> None:
    tokenizer = Tokenizer.from_metadata(with_tokens(("<tool>", 4)))
    tool = tokenizer.vocab_size - 1
    assert tokenizer.encode("he<tool>ll", parse_special=False) == [
        *tokenizer.encode("he"),
        tool,
        *tokenizer.encode("ll"),
    ]
    assert tokenizer.decode([tool]) == "<tool>"


def test_of_tokens_that_begin_together_the_longest_is_found() -> None:
    tokenizer = Tokenizer.from_metadata(with_tokens(("<a>", 4), ("<a><b>", 4)))
    assert tokenizer.encode("<a><b><a>") == [tokenizer.vocab_size - 1, tokenizer.vocab_size - 2]


def test_skip_special_hides_control_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_bos_is_added_once() -> None:
    tokenizer = Tokenizer.from_metadata(small_metadata(add_bos_token=True))
    hello = tokenizer.encode("hell", add_bos=False)
    assert 1 not in hello
    assert tokenizer.encode("hell") == [1, *hello]
    assert tokenizer.encode("<|im_start|>hell") == [1, *hello]
    assert tokenizer.encode("<|im_start|>hell", parse_special=False)[:1] == [1]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("", add_bos=False) == []


def test_bos_is_not_added_unless_the_model_wants_it() -> None:
    assert Tokenizer.from_metadata(small_metadata()).encode("") == []
    assert Tokenizer.from_metadata(small_metadata(add_bos_token=False, pre="llama-bpe")).encode("") == []
    assert Tokenizer.from_metadata(small_metadata(pre="llama-bpe")).encode("") == [1]  # llama.cpp's default for it


def test_end_tokens_of_the_default_model(tokenizer: Tokenizer) -> None:
    texts = {tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids}
    assert texts == {"<|endoftext|>", "<|im_end|>", "<reponame>"}  # as llama.cpp prints them when it loads the file
    assert tokenizer.eos_token_id == 2


def test_end_tokens_are_those_listed_and_those_known_by_name() -> None:
    metadata = with_tokens(("<stop>", 3), ("<done>", 3), ("<|eot_id|>", 1), eot_token_id=323, eom_token_id=324)
    metadata["tokenizer.ggml.eot_token_id"] = len(metadata["tokenizer.ggml.tokens"]) - 3  # type: ignore[arg-type]
    metadata["tokenizer.ggml.eom_token_id"] = len(metadata["tokenizer.ggml.tokens"]) - 2  # type: ignore[arg-type]
    tokenizer = Tokenizer.from_metadata(metadata)
    texts = {tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids}
    assert texts == {"<|endoftext|>", "<|im_end|>", "<stop>", "<done>", "<|eot_id|>"}
    assert tokenizer.vocab_size - 1 in tokenizer.special_token_ids  # a control token, though the file calls it ordinary


def test_end_of_message_is_not_the_end_where_calls_follow() -> None:
    tokenizer = Tokenizer.from_metadata(with_tokens(("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)))
    ends = {tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids}
    assert "<|end|>" not in ends and {"<|return|>", "<|call|>"} <= ends


# Bytes


def test_token_bytes_of_each_kind() -> None:
    tokenizer = Tokenizer.from_metadata(with_tokens(("<é>", 4), ("[PAD7]", 5), ("naïve café", 1)))
    size = tokenizer.vocab_size
    assert tokenizer.token_bytes(0) == b"<|endoftext|>"
    assert tokenizer.token_bytes(size - 3) == "<é>".encode()
    assert tokenizer.token_bytes(size - 2) == b""
    assert tokenizer.token_bytes(size - 1) == "naïve café".encode()  # a space is not in the alphabet: plain text
    (space_t,) = tokenizer.encode(" t")
    assert tokenizer.token_bytes(space_t) == b" t"


def test_invalid_bytes_decode_to_replacement_characters(tokenizer: Tokenizer) -> None:
    first_byte, *_ = tokenizer.encode("\U00020000")
    assert tokenizer.decode([first_byte]) == "\ufffd"


def test_byte_without_a_token_is_dropped_and_its_neighbours_do_not_merge() -> None:
    metadata = small_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[tokens.index("x")] = "xx"
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("hxe") == [*tokenizer.encode("h"), *tokenizer.encode("e")] != tokenizer.encode("he")


@pytest.mark.parametrize("token_id", [-1, 49152, 10**9])
def test_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, token_id: int) -> None:
    for use in (tokenizer.token_bytes, tokenizer.token_text, lambda i: tokenizer.decode([i])):
        with pytest.raises(InvalidRequestError, match=f"token id {token_id} is outside the vocabulary of 49152"):
            use(token_id)


def test_unpaired_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"unpaired surrogate U\+D83D at character 2"):
        tokenizer.encode("ab\ud83d")


# Metadata that is wrong


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_missing_metadata_is_named(key: str) -> None:
    with pytest.raises(ModelFileError, match=f"tokenizer.ggml.{key} is missing"):
        Tokenizer.from_metadata(small_metadata(**{key: None}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": 3}, "tokenizer.ggml.model must be str, not int"),
        ({"tokens": "abc"}, "tokens must be an array, not str"),
        ({"tokens": [1, 2]}, "tokens must be an array of strings"),
        ({"tokens": []}, "tokens is empty"),
        ({"merges": np.zeros(3)}, "merges must be an array of strings"),
        ({"merges": ["he"]}, r"merges\[0\] is 'he', not two tokens"),
        ({"merges": ["h e", "h e l"]}, r"merges\[1\] is 'h e l', not two tokens"),
        ({"merges": ["h q"]}, "merges does not fit"),
        ({"merges": ["zz e"]}, "merges does not fit"),
        ({"token_type": np.zeros(4, np.int32)}, "token_type has 4 entries for 263 tokens"),
        ({"token_type": np.full(263, 9, np.int32)}, "token_type holds 9"),
        ({"bos_token_id": 263}, "bos_token_id is 263, outside the vocabulary of 263"),
        ({"eos_token_id": -1}, "eos_token_id is -1, outside the vocabulary"),
        ({"eos_token_id": True}, "eos_token_id must be int, not bool"),
        ({"eot_token_id": 2.5}, "eot_token_id must be int, not float"),
        ({"add_bos_token": 1}, "add_bos_token must be bool, not int"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token is true, but .*bos_token_id is missing"),
    ],
)
def test_wrong_metadata_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem):
        Tokenizer.from_metadata(small_metadata(**changes))


def test_duplicate_tokens_are_named() -> None:
    with pytest.raises(ModelFileError, match="holds 'he' twice, as ids 25[0-9] and 263"):
        Tokenizer.from_metadata(with_tokens(("he", 1)))


def test_empty_tokens_are_never_found() -> None:
    tokenizer = Tokenizer.from_metadata(with_tokens(("", 1), ("", 4)))
    assert tokenizer.decode(tokenizer.encode("hello  there")) == "hello  there"
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""


def test_vocabulary_without_merges_or_kinds_is_bytes() -> None:
    tokenizer = Tokenizer.from_metadata(small_metadata(merges=[], token_type=None))
    assert len(tokenizer.encode("hello")) == 5


def test_unknown_tokenizers_are_named_with_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match="tokenizer 'llama' .* not supported; supported: 'gpt2'"):
        Tokenizer.from_metadata(small_metadata(model="llama"))
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'viking' .*supported: .*llama-bpe.*smollm"):
        Tokenizer.from_metadata(small_metadata(pre="viking"))
    with pytest.raises(UnsupportedModelError, match="does not name its pre-tokenizer"):
        Tokenizer.from_metadata(small_metadata(pre=None))
