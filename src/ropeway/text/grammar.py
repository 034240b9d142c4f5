"""Grammars that an answer must follow: JSON schemas, regular expressions, choices, Lark and GBNF, as one kind of text.

Owns the compiled grammars, cached, and the state of each sequence within its own. The parsing is llguidance's. A
grammar is plain text (`json_schema_grammar` and its siblings make it), so that requests stay plain data. Knows nothing
of sampling or of the engine.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ropeway.errors import InvalidRequestError
from ropeway.text.json_schema import normalised_schema
from ropeway.text.schema_recursion import bounded_recursion
from ropeway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance  # imported where it is used: a server that gets no grammar does without 50 ms and 20 MB

MAX_GRAMMAR_CHARS = 1 << 18
MAX_CACHED_GRAMMARS = 256
# Between the parts of JSON: one space where Python's json puts one, and no line breaks, which small models repeat.
_JSON_LAYOUT: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}

# Regular expressions of tokens that a state may allow all together, so that they are not tried one by one: text within
# a JSON string, by its length, for strings whose length is bounded. Masks are the same whatever the slices. Those of
# llguidance know the lengths 10 and 30 only; with these the masks of 32 sequences take 2.5 ms instead of 3.2.
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (1, 2, 3, 4, 6, 8, 10, 15, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]


def json_schema_grammar(schema: object) -> str:
    """A grammar of JSON texts that fit `schema`: a JSON Schema as decoded JSON.

    Raises InvalidRequestError naming the keyword that is wrong or not supported.
    """
    import llguidance

    text = json.dumps(bounded_recursion(normalised_schema(schema)))
    try:
        with _panics_refused():
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON_LAYOUT)
    except ValueError as error:
        raise InvalidRequestError(f"the JSON schema cannot be read: {_one_line(str(error))}") from None
    with _panics_refused():
        problem = llguidance.LLMatcher.validate_grammar(grammar)
    if problem:
        raise InvalidRequestError(_schema_problem(_one_line(problem)))
    return grammar


def embedded_json(schema: Mapping[str, Any]) -> str:
    """A schema for %json within a Lark grammar. Raises as `json_schema_grammar` does."""
    json_schema_grammar(dict(schema))
    normalised = bounded_recursion(normalised_schema(dict(schema)))
    return json.dumps({**normalised, "x-guidance": _JSON_LAYOUT})


def json_object_grammar() -> str:
    """A grammar of any JSON object."""
    return json_schema_grammar({"type": "object"})


def regex_grammar(regex: str) -> str:
    """A grammar of the texts that a regular expression matches from end to end; without look-around."""
    import llguidance

    return llguidance.LLMatcher.grammar_from_regex(regex)


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar of exactly these texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(choice) for choice in choices))


def lark_grammar(grammar: str) -> str:
    """A grammar in llguidance's Lark, or in llama.cpp's GBNF. Raises InvalidRequestError where it is neither."""
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return llguidance.LLMatcher.grammar_from_lark(any_to_lark(grammar))
    except Exception as error:  # the converter raises bare exceptions for text it cannot read
        raise InvalidRequestError(f"the grammar cannot be read: {error}") from None


def with_subgrammar(lark: str, name: str, grammar: str) -> str:
    """A grammar in Lark in which `@name` stands for another grammar of any kind."""
    # Lark is kept as it was written, every other kind as a list of grammars, of which the first is the whole.
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**parts[0], "name": name}, *parts[1:]]})


@contextmanager
def _panics_refused() -> Iterator[None]:
    """A panic of the parser, for which some malformed schemas suffice, is the caller's mistake, not the end of all."""
    try:
        yield
    except BaseException as error:  # a panic is no Exception, and its class has no name to import
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequestError(f"the grammar cannot be read: {_one_line(str(error))[:200]}") from None


class GrammarMatcher:
    """One sequence's way through its grammar."""

    __slots__ = ("matcher",)

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher


class Grammars:
    """Compiled grammars of one tokenizer, cached. Thread-safe.

    The first use of any grammar reads the whole vocabulary, once; `prepare` does so beforehand.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._vocabulary: llguidance.LLTokenizer | None = None

    def prepare(self) -> None:
        """Reads the vocabulary, where that has not happened yet."""
        with self._lock:
            self._read_vocabulary()

    def is_compiled(self, grammar: str) -> bool:
        """Whether `check` returns at once."""
        return grammar in self._compiled

    def check(self, grammar: str) -> None:
        """Compiles a grammar, or finds it compiled. Raises InvalidRequestError for one that is wrong or too large."""
        self._prototype(grammar)

    def new_matcher(self, grammar: str) -> GrammarMatcher:
        """The beginning of a grammar. Raises as `check` does."""
        return GrammarMatcher(self._prototype(grammar).deep_copy())

    def fill_masks(self, matchers: Sequence[GrammarMatcher], words: npt.NDArray[np.uint32]) -> None:
        """words[M, ceil(vocabulary / 32)]: a bit per token, low bits first: 1 where the token may come next.

        A matcher that cannot go on (its grammar needs more than its limits) allows nothing.
        """
        assert words.flags["C_CONTIGUOUS"] and len(words) == len(matchers)
        first, size = words.ctypes.data, words.shape[1] * 4
        for row, each in enumerate(matchers):  # not by an LLExecutor, whose thread takes 1.3 to 1.6 times the time
            each.matcher.unsafe_compute_mask_ptr(first + row * size, size)
            if each.matcher.is_error():
                words[row] = 0

    def accept(self, matcher: GrammarMatcher, token_id: int) -> bool:
        """Goes on by a token that the mask allowed; whether the text is complete, so that nothing may follow."""
        is_accepted: bool = matcher.matcher.consume_token(token_id)
        return is_accepted and bool(matcher.matcher.is_stopped())

    def _prototype(self, grammar: str) -> llguidance.LLMatcher:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
            if len(grammar) > MAX_GRAMMAR_CHARS:
                raise InvalidRequestError(
                    f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are taken"
                )
            vocabulary = self._read_vocabulary()
        import llguidance

        with _panics_refused():
            compiled = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        if compiled.is_error():
            raise InvalidRequestError(_one_line(compiled.get_error()))
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        if self._vocabulary is None:
            import llguidance

            wrapper = llguidance.TokenizerWrapper(_VocabularySource(self._tokenizer))
            end_ids = sorted(self._tokenizer.eos_token_ids)
            self._vocabulary = llguidance.LLTokenizer(wrapper, eos_token=end_ids, slices=_SLICES)
        return self._vocabulary


class _VocabularySource:
    """A tokenizer in the shape that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        end_ids = sorted(tokenizer.eos_token_ids)
        self.eos_token_id = end_ids[0] if tokenizer.eos_token_id is None and end_ids else tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_bos=False, parse_special=False)


def structured_output_grammar(options: Mapping[str, Any]) -> str:
    """The grammar that vLLM's structured_outputs asks for: exactly one of json, json_object, regex, choice, grammar.

    Raises InvalidRequestError naming what is wrong.
    """
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    known = ("json", "json_object", "regex", "choice", "grammar")
    if len(given) != 1 or not given.keys() <= set(known):
        raise InvalidRequestError(
            f"structured_outputs holds exactly one of {', '.join(known)}, not {', '.join(sorted(given)) or 'nothing'}"
        )
    ((name, value),) = given.items()
    match name:
        case "json":
            return json_schema_grammar(_decoded(value) if isinstance(value, str) else value)
        case "json_object":
            return json_object_grammar()
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
                raise InvalidRequestError("structured_outputs.choice must be a list of non-empty texts")
            return choice_grammar(value)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"structured_outputs.{name} must be a non-empty text")
    if name == "regex":
        return regex_grammar(value)
    _check_embedded_schemas(value)
    return lark_grammar(value)


def _check_embedded_schemas(grammar: str) -> None:
    """Raises InvalidRequestError where a schema within a Lark grammar would be refused by itself."""
    for found in re.finditer(r"%json\s*", grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"%json must be followed by a JSON schema: {error}") from None
        json_schema_grammar(schema)


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"structured_outputs.json is not JSON: {error}") from None


def _schema_problem(problem: str) -> str:
    """What is wrong with a schema, beginning with the keyword where the compiler does not name it."""
    for sign, keyword in (("regex", "pattern"), ("Pointer", "$ref"), ("ref", "$ref"), ("type", "type")):
        if sign in problem:
            return f"keyword {keyword!r} of the JSON schema: {problem}"
    return f"the JSON schema is not supported: {problem}"


def _one_line(message: str) -> str:
    return " ".join(message.split())[:500]
