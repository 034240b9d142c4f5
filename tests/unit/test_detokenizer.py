"""The detokenizer: no half characters, stop strings held back until decided, tokens counted through the match."""

from __future__ import annotations

import numpy as np
import pytest

from ropeway.errors import InvalidRequestError
from ropeway.text.detokenizer import Detokenizer
from ropeway.text.tokenizer import Tokenizer
from support.tokenizer_strings import boundary_blind_metadata


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The 256 bytes, a few longer tokens, and three control tokens."""
    return Tokenizer.from_metadata(boundary_blind_metadata("gpt-2", ["h e", "l l", "he ll", "a b", "ab ab"], []))


def ids_of(tokenizer: Tokenizer, text: str | bytes) -> list[int]:
    """One token per byte."""
    id_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    data = text.encode() if isinstance(text, str) else text
    return [id_of[bytes([byte])] for byte in data]


def pushes(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.push([token_id]) for token_id in ids] + [detokenizer.finish()]


def test_characters_are_shown_when_complete(tokenizer: Tokenizer) -> None:
    assert pushes(Detokenizer(tokenizer), ids_of(tokenizer, "a€b")) == ["a", "", "", "€", "b", ""]


def test_a_token_that_is_whole_by_itself_may_end_a_broken_character(tokenizer: Tokenizer) -> None:
    """What a token is alone says nothing of it behind the beginning of a character."""
    (a,) = ids_of(tokenizer, "a")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([a]) == "a"
    assert detokenizer.push(ids_of(tokenizer, b"\xe2\x82")) == ""
    assert detokenizer.push([a]) == "\ufffda"
    assert detokenizer.push([a]) == "a"


def test_invalid_bytes_are_shown_as_a_whole_decode_would(tokenizer: Tokenizer) -> None:
    for data in (b"\xe2\x82a", b"\xff\xfe", b"\xf0\x9f\x92", b"\xc3\xc3\xa9", b"\xed\xa0\x80x", b"\xf4\x90\x80\x80"):
        shown = "".join(pushes(Detokenizer(tokenizer), ids_of(tokenizer, data)))
        assert shown == data.decode(errors="replace"), data


def test_unfinished_character_is_replaced_at_the_end_once(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids_of(tokenizer, b"x\xe2\x82")) == "x"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_sequences_with_the_same_stop_strings_are_read_apart(tokenizer: Tokenizer) -> None:
    first, second = Detokenizer(tokenizer, stop=["abc"]), Detokenizer(tokenizer, stop=["abc"])
    shown = ["", ""]
    for a, b in zip("xabcz", "abxab", strict=True):
        shown[0] += first.push(ids_of(tokenizer, a))
        shown[1] += second.push(ids_of(tokenizer, b))
    assert (shown, first.matched_stop, second.matched_stop) == (["x", "abx"], "abc", None)
    assert second.finish() == "ab"


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [1, *ids_of(tokenizer, "hi"), 2]
    assert "".join(pushes(Detokenizer(tokenizer), ids)) == "hi"
    assert "".join(pushes(Detokenizer(tokenizer, skip_special=False), ids)) == "<|im_start|>hi<|im_end|>"


def test_character_around_a_skipped_token_stays_whole(tokenizer: Tokenizer) -> None:
    first, second = ids_of(tokenizer, "é")
    assert Detokenizer(tokenizer).push([first, 2, second]) == "é"


def test_stop_string_over_tokens_is_held_back_and_never_shown(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["END"])
    assert pushes(detokenizer, ids_of(tokenizer, "aEENDzz")) == ["a", "", "E", "", "", "", "", ""]
    assert detokenizer.is_stopped
    assert detokenizer.matched_stop == "END"
    assert detokenizer.num_tokens == 5


def test_text_that_only_began_like_a_stop_string_is_shown(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["END"])
    assert pushes(detokenizer, ids_of(tokenizer, "ENxE")) == ["", "", "ENx", "", "E"]
    assert not detokenizer.is_stopped


def test_stop_string_inside_one_token(tokenizer: Tokenizer) -> None:
    (abab,) = tokenizer.encode("abab")
    detokenizer = Detokenizer(tokenizer, stop=["ba"])
    assert detokenizer.push([abab]) == "a"
    assert (detokenizer.is_stopped, detokenizer.num_tokens) == (True, 1)


def test_tokens_after_the_match_are_neither_shown_nor_counted(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["b"])
    assert detokenizer.push(ids_of(tokenizer, "abcd")) == "a"
    assert detokenizer.push(ids_of(tokenizer, "efg")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == 2


@pytest.mark.parametrize(
    ("stop", "text", "shown", "matched"),
    [
        (["abcd", "bc"], "xabcd", "xa", "bc"),  # complete first
        (["bc", "abc"], "xabc", "x", "abc"),  # complete at once: the longer
        (["b", "c"], "xcb", "x", "c"),
        (["aab"], "aaab", "a", "aab"),
        (["abab", "aba"], "xabab", "x", "aba"),
        (["é"], "caé!", "ca", "é"),
        (["hers", "his", "she", "he"], "ushers", "u", "she"),
        (["\n\n"], "a\n\n\n", "a", "\n\n"),
    ],
)
def test_first_match(tokenizer: Tokenizer, stop: list[str], text: str, shown: str, matched: str) -> None:
    for size in (1, 2, 3, 100):
        detokenizer = Detokenizer(tokenizer, stop=stop)
        ids = ids_of(tokenizer, text)
        pieces = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
        assert "".join(pieces) + detokenizer.finish() == shown
        assert detokenizer.matched_stop == matched


def test_stop_string_before_min_tokens_is_text(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "ab-ab-ab")
    for min_tokens, shown, num_tokens in ((0, "", 2), (2, "", 2), (3, "ab-", 5), (6, "ab-ab-", 8), (9, "ab-ab-ab", 8)):
        detokenizer = Detokenizer(tokenizer, stop=["ab"], min_tokens=min_tokens)
        assert "".join(pushes(detokenizer, ids)) == shown
        assert detokenizer.num_tokens == num_tokens


def test_stop_string_that_begins_before_min_tokens_counts_when_complete_after(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["aaa"], min_tokens=4)
    assert pushes(detokenizer, ids_of(tokenizer, "aaaaa")) == ["", "", "a", "", "", ""]
    assert detokenizer.num_tokens == 4


def test_replacement_characters_can_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["a\ufffd"])
    assert detokenizer.push(ids_of(tokenizer, b"xa\xe2")) == "x"
    assert detokenizer.finish() == ""
    assert detokenizer.is_stopped


def test_skipped_tokens_count(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, stop=["b"])
    detokenizer.push([1, *ids_of(tokenizer, "a"), 2, *ids_of(tokenizer, "b")])
    assert detokenizer.num_tokens == 4


def test_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        Detokenizer(tokenizer).push(np.array([10**6]))
