"""However ids are cut into pushes, the text shown is the whole decoding, cut off at the first stop string."""

from __future__ import annotations

import codecs
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway.text.detokenizer import Detokenizer
from ropeway.text.tokenizer import Tokenizer
from support.tokenizer_strings import boundary_blind_metadata

LETTERS = "ab\u00e9\u4e2d\U0001f469\u200d\ufffd"


@cache
def tokenizer() -> Tokenizer:
    merges = ["a b", "ab ab", "b a", "Ã ©", "ä ¸", "ä¸ Ń", "ð Ł", "ðŁ ĳ", "ĳ ©", "â Ģ"]
    return Tokenizer.from_metadata(boundary_blind_metadata("gpt-2", merges, []))


@cache
def byte_ids() -> dict[int, int]:
    return {tokenizer().token_bytes(i)[0]: i for i in range(3, 3 + 256)}


texts = st.text(LETTERS, max_size=20)
ids_of_text = texts.map(lambda text: [byte_ids()[byte] for byte in text.encode()])
any_ids = st.lists(st.integers(0, 3 + 256 + 9), max_size=40)
ids_lists = st.lists(st.one_of(ids_of_text, any_ids), max_size=3).map(lambda parts: [i for part in parts for i in part])
stops = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)


def first_match(ids: list[int], stop: list[str], min_tokens: int, hidden: frozenset[int]) -> tuple[str, int]:
    """The specification, by brute force: decode anew after every token, look at every end of the text."""
    data, seen = b"", ""
    for num_tokens, token_id in enumerate(ids, start=1):
        data += b"" if token_id in hidden else tokenizer().token_bytes(token_id)
        text, _ = codecs.utf_8_decode(data, "replace", False)
        if num_tokens >= min_tokens:
            cut = _cut(text, len(seen), stop)
            if cut is not None:
                return cut, num_tokens
        seen = text
    text = data.decode(errors="replace")
    cut = _cut(text, len(seen), stop) if len(ids) >= min_tokens else None
    return (text if cut is None else cut), len(ids)


def _cut(text: str, num_seen: int, stop: list[str]) -> str | None:
    for end in range(num_seen + 1, len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            return text[: end - max(map(len, found))]
    return None


@settings(max_examples=200, deadline=None)
@given(ids_lists, stops, st.integers(0, 12), st.booleans(), st.data())
def test_any_split_shows_the_decoding_up_to_the_first_stop(
    ids: list[int], stop: list[str], min_tokens: int, skip_special: bool, data: st.DataObject
) -> None:
    detokenizer = Detokenizer(tokenizer(), stop=stop, min_tokens=min_tokens, skip_special=skip_special)
    hidden = tokenizer().special_token_ids if skip_special else frozenset()
    expected, num_tokens = first_match(ids, stop, min_tokens, hidden)
    shown, position = "", 0
    while position < len(ids):
        size = data.draw(st.integers(1, len(ids) - position))
        shown += detokenizer.push(ids[position : position + size])
        assert expected.startswith(shown)  # never more than what stays
        position += size
    shown += detokenizer.finish()
    assert shown == expected
    assert detokenizer.num_tokens == num_tokens
    if not stop:
        assert shown == tokenizer().decode(ids, skip_special=skip_special)


@settings(max_examples=100, deadline=None)
@given(ids_lists, stops)
def test_text_is_shown_as_soon_as_no_stop_string_can_claim_it(ids: list[int], stop: list[str]) -> None:
    detokenizer = Detokenizer(tokenizer(), stop=stop)
    shown, complete = "", ""
    for position, token_id in enumerate(ids):
        shown += detokenizer.push([token_id])
        if detokenizer.is_stopped:
            return
        data = b"".join(
            tokenizer().token_bytes(i) for i in ids[: position + 1] if i not in tokenizer().special_token_ids
        )
        complete, _ = codecs.utf_8_decode(data, "replace", False)
        held_back = complete[len(shown) :]
        assert not held_back or any(word.startswith(held_back) and word != held_back for word in stop)
