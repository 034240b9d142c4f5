"""Token ids to text as they arrive, and stop strings.

Owns what has been generated but cannot be shown yet: bytes of an unfinished character, and text that may turn out
to be the beginning of a stop string. Knows nothing of sampling or of the engine; a sequence that stops here is
reported to it by the caller.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

from ropeway.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence, given out piece by piece.

    For every way of cutting the ids into `push` calls, what `push` and `finish` return, joined, is the decoding of
    all ids, cut off where the first stop string begins. The first is the one that is complete first; of two
    complete at once, the longer.

    stop: texts that end the sequence; not part of what is shown.
    min_tokens: a stop string that is complete before this many tokens is ordinary text.
    skip_special: control tokens have no text.
    shows_stop: the stop string that ends the sequence is shown too.
    """

    __slots__ = (
        "_held_back",
        "_hidden",
        "_min_tokens",
        "_shows_stop",
        "_stop_finder",
        "_tokenizer",
        "_unfinished_bytes",
        "matched_stop",
        "num_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special: bool = True,
        shows_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special else frozenset()
        self._stop_finder = _StopFinder(_stop_table(tuple(stop))) if stop else None
        self._min_tokens = min_tokens
        self._shows_stop = shows_stop
        self._unfinished_bytes = b""
        self._held_back = ""
        self.num_tokens = 0  # up to and including the one that completed the stop string
        self.matched_stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found: nothing pushed from now on counts or is shown."""
        return self.matched_stop is not None

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens of the sequence and returns the text that is safe to show now.

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        shown = ""
        for token_id in token_ids:
            if self.matched_stop is not None:
                break
            self.num_tokens += 1
            if token_id in self._hidden:
                continue
            text = None if self._unfinished_bytes else self._tokenizer.whole_text(token_id)
            if text is None:
                text = self._decode(token_id)
            shown += text if self._stop_finder is None else self._release(text)
        return shown

    def _decode(self, token_id: int) -> str:
        """The characters that a token completes, or begins and ends."""
        token_bytes = self._unfinished_bytes + self._tokenizer.token_bytes(token_id)
        text, num_bytes = codecs.utf_8_decode(token_bytes, "replace", False)
        self._unfinished_bytes = token_bytes[num_bytes:]
        return text

    def finish(self) -> str:
        """The rest of the text, when no more tokens will come; an unfinished character becomes U+FFFD. Again:
        nothing.
        """
        if self.matched_stop is not None:
            return ""
        text = self._unfinished_bytes.decode("utf-8", errors="replace")
        self._unfinished_bytes = b""
        shown = self._release(text)
        if self.matched_stop is None:
            shown += self._held_back
            self._held_back = ""
        return shown

    def _release(self, text: str) -> str:
        """Adds `text` to what is held back and returns the part of it that no stop string can claim any more."""
        finder = self._stop_finder
        if finder is None:
            return text
        match_end = finder.feed(text, is_honoured=self.num_tokens >= self._min_tokens)
        text = self._held_back + text
        if match_end is not None:
            assert finder.matched is not None
            self.matched_stop = finder.matched
            end = len(self._held_back) + match_end
            self._held_back = ""
            self._unfinished_bytes = b""
            return text[:end] if self._shows_stop else text[: end - len(self.matched_stop)]
        num_shown = len(text) - finder.num_held_back
        self._held_back = text[num_shown:]
        return text[:num_shown]


class _StopFinder:
    """Finds any of several strings in text that arrives in pieces, one table look-up per character whatever the
    strings.
    """

    __slots__ = ("_state", "_table", "matched")

    def __init__(self, table: _StopTable) -> None:
        self._table = table
        self._state = 0
        self.matched: str | None = None

    @property
    def num_held_back(self) -> int:
        """How many of the last characters fed may be the beginning of a stop string."""
        return self._table.num_held_back[self._state]

    def feed(self, text: str, *, is_honoured: bool) -> int | None:
        """Reads on. Returns how many characters of `text` complete the first match, or None; without
        `is_honoured`, matches that end in `text` are passed over."""
        table, state = self._table, self._state
        children, fallback, match = table.children, table.fallback, table.match
        for num_read, character in enumerate(text, start=1):
            while character not in children[state] and state:
                state = fallback[state]
            state = children[state].get(character, 0)
            if is_honoured and match[state] is not None:
                self.matched = match[state]
                return num_read
        self._state = state
        return None


class _StopTable:
    """The automaton of Aho and Corasick (1975) over some strings, for any number of texts at once: a state is the
    longest end of a text so far that begins one of the strings.

    Of each state: children, by character; fallback, the state of the longest proper end of its text; match, the longest
    stop string that its text ends with; num_held_back, the length of the longest end of its text that can still grow
    into a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.match: list[str | None] = [None]
        self.num_held_back = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.children[state].get(character)
            if following is None:
                following = self.children[state][character] = len(self.children)
                self.children.append({})
                self.fallback.append(0)
                self.match.append(None)
                self.num_held_back.append(0)
            state = following
        self.match[state] = stop

    def _link(self) -> None:
        """Fills in the tables that look back, shortest texts first, so that what they refer to is complete."""
        depth = [0] * len(self.children)
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for character, child in self.children[state].items():
                depth[child] = depth[state] + 1
                if state:
                    fallback = self.fallback[state]
                    while character not in self.children[fallback] and fallback:
                        fallback = self.fallback[fallback]
                    self.fallback[child] = self.children[fallback].get(character, 0)
                queue.append(child)
            if self.match[state] is None:
                self.match[state] = self.match[self.fallback[state]]
            can_grow = bool(self.children[state])
            self.num_held_back[state] = depth[state] if can_grow else self.num_held_back[self.fallback[state]]


@lru_cache(maxsize=8)
def _stop_table(stops: tuple[str, ...]) -> _StopTable:
    """Built once for all the sequences of a request: thousands of states take milliseconds and megabytes."""
    return _StopTable(stops)
