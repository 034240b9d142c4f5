"""Grammars: what is taken, what is refused by keyword, and that answers follow them whatever the model draws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tests.support.json_schemas import REFUSED, SUPPORTED

from ropeway import LLM, SamplingParams
from ropeway.errors import InvalidRequestError
from ropeway.model.gguf import GgufFile
from ropeway.text.grammar import (
    MAX_CACHED_GRAMMARS,
    Grammars,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    structured_output_grammar,
)
from ropeway.text.schema_recursion import MAX_RECURSION, bounded_recursion
from ropeway.text.tokenizer import Tokenizer

SHORT = ("point", "pattern plate", "enum of anything", "recursive list", "one of by a constant", "date", "unicode enum",
         "tuple", "optional properties", "nested references", "person", "weather report")  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(GgufFile.open(tiny_model_path).metadata)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


@pytest.fixture(scope="module")
def llm(tiny_model_path: Path) -> LLM:
    return LLM(tiny_model_path, max_model_len=512, num_kv_blocks=256, max_num_seqs=32, max_num_batched_tokens=64)


def test_there_are_enough_schemas() -> None:
    assert len(SUPPORTED) >= 60 and len(REFUSED) >= 10


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_schemas(grammars: Grammars, name: str) -> None:
    Draft202012Validator.check_schema(SUPPORTED[name])
    grammars.check(json_schema_grammar(SUPPORTED[name]))


@pytest.mark.parametrize("keyword", REFUSED)
def test_refusals_name_the_keyword(keyword: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(keyword)):
        json_schema_grammar(REFUSED[keyword])


@pytest.mark.parametrize(
    "schema", [5, "x", None, [], {"anyOf": []}, {"anyOf": {}}, {"properties": []}, {"items": {"type": "x"}}]
)
def test_what_is_no_schema(schema: Any) -> None:
    with pytest.raises(InvalidRequestError):
        json_schema_grammar(schema)


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequestError, match="64 schemas deep"):
        json_schema_grammar(schema)


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_fit_their_schemas(llm: LLM, temperature: float) -> None:
    """The tiny model knows no JSON: only the masks can make its answers fit."""
    params = [
        SamplingParams(
            temperature=temperature, seed=3, n=2, max_tokens=450, grammar=json_schema_grammar(SUPPORTED[name])
        )
        for name in SHORT
    ]
    for name, output in zip(SHORT, llm.generate([f"JSON: {name}" for name in SHORT], params), strict=True):
        validator = Draft202012Validator(SUPPORTED[name], format_checker=Draft202012Validator.FORMAT_CHECKER)
        for completion in output.outputs:
            assert completion.finish_reason == "stop", (name, completion.text)
            validator.validate(json.loads(completion.text))
            assert completion.token_ids[-1] not in llm.tokenizer.eos_token_ids  # no step is spent on an end token


def test_answers_do_not_depend_on_preemption(tiny_model_path: Path) -> None:
    small = LLM(
        tiny_model_path,
        max_model_len=256,
        num_kv_blocks=20,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        admission="optimistic",
    )
    params = [
        SamplingParams(
            temperature=1, seed=seed, max_tokens=200, grammar=json_schema_grammar(SUPPORTED["weather report"])
        )
        for seed in range(6)
    ]
    together = small.generate(["x"] * 6, params)
    assert small.stats().num_preemptions > 0
    alone = [small.generate("x", each)[0] for each in params]
    assert [output.outputs for output in together] == [output.outputs for output in alone]


def run(llm: LLM, grammar: str, **options: Any) -> tuple[str, str | None]:
    params = SamplingParams(**{"temperature": 1, "seed": 5, "max_tokens": 60, "grammar": grammar, **options})
    (completion,) = llm.generate("x", params)[0].outputs
    return completion.text, completion.finish_reason


def test_bans_give_way_where_the_grammar_leaves_nothing_else(llm: LLM) -> None:
    assert run(llm, regex_grammar("[ab]c{3}[ab]"), bad_words=["a", "c"]) == ("bcccb", "stop")
    assert run(llm, choice_grammar(["né 🚡"]), bad_words=["é", "🚡"]) == ("né 🚡", "stop")
    (a,) = llm.tokenizer.encode("a", add_bos=False)
    assert run(llm, regex_grammar("a"), min_tokens=5, stop_token_ids=[a])[1] == "stop"


def test_regex_choice_and_grammar(llm: LLM) -> None:
    text, reason = run(llm, regex_grammar("[a-c]{3}-[0-9]+é?"))
    assert reason == "length" or re.fullmatch("[a-c]{3}-[0-9]+é?", text)
    assert run(llm, regex_grammar("(ab){2}c")) == ("ababc", "stop")
    seen = {run(llm, choice_grammar(["yes", "no", 'may"be\n']), seed=seed) for seed in range(12)}
    assert seen <= {("yes", "stop"), ("no", "stop"), ('may"be\n', "stop")} and len(seen) > 1
    text, reason = run(llm, lark_grammar('start: "(" inner ")"\ninner: "x" | "[" inner "]"'))
    assert reason == "length" or re.fullmatch(r"\(\[*x\]*\)", text)
    text, reason = run(llm, lark_grammar('root ::= "a" | "b" "c"'))  # GBNF
    assert (text, reason) in (("a", "stop"), ("bc", "stop"))


def test_other_parameters_hold_too(llm: LLM) -> None:
    letters = regex_grammar("[a-z]*")
    text, _ = run(llm, letters, min_tokens=7)
    assert len(text) >= 7
    assert run(llm, regex_grammar("ab"), min_tokens=50) == ("ab", "stop")  # a complete text ends all the same
    assert run(llm, regex_grammar("ab"), ignore_eos=True) == ("ab", "stop")
    assert run(llm, regex_grammar("abcdef"), stop="cd") == ("ab", "stop")
    assert run(llm, regex_grammar("abcdef"), max_tokens=2) == ("ab", "length")
    letter = llm.tokenizer.encode("q", add_bos=False)[0]
    text, _ = run(llm, letters, logit_bias={letter: 100.0}, max_tokens=5)
    assert text == "qqqqq"
    (output,) = llm.generate("x", SamplingParams(grammar=choice_grammar(["ab"]), logprobs=2, temperature=0))
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and logprobs[0].token_id not in logprobs[0].top_ids  # of the raw logits


def test_other_rows_are_left_alone(llm: LLM) -> None:
    free = SamplingParams(temperature=1, seed=2, max_tokens=20, ignore_eos=True)
    bound = SamplingParams(temperature=1, seed=2, max_tokens=20, grammar=regex_grammar("[0-9]{20}"))
    alone = llm.generate("x", free)[0].outputs
    mixed = llm.generate(["x", "x", "x"], [free, bound, free])
    assert mixed[0].outputs == mixed[2].outputs == alone
    assert mixed[1].outputs[0].text.isdecimal()


def test_what_the_parser_panics_at_is_refused() -> None:
    """Its message cuts a schema at 100 bytes, wherever a character ends."""
    for number in range(4):
        with pytest.raises(InvalidRequestError, match="cannot be read|Expected f64 for 'maximum'"):
            json_schema_grammar({"type": "number", "maximum": ["x" * number + "🚡" * 40]})


FAR = -9223372036854775807


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("enum", {"enum": [1, FAR]}),
        ("const", {"type": "object", "properties": {"a": {"const": {"b": [FAR]}}}}),
        ("minimum", {"type": "integer", "minimum": FAR, "maximum": FAR}),
        ("maximum", {"type": "integer", "maximum": float(FAR)}),
    ],
)
def test_numbers_at_which_the_compiler_recurses_without_end_are_refused(keyword: str, schema: dict[str, Any]) -> None:
    for options in ({"json": schema}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        with pytest.raises(InvalidRequestError, match=rf"keyword '{keyword}'.* from -2\^53 to 2\^53"):
            structured_output_grammar(options)
    structured_output_grammar({"grammar": 'start: "a" %json {"enum": [-9007199254740992]}'})
    with pytest.raises(InvalidRequestError, match="%json must be followed by"):
        structured_output_grammar({"grammar": "start: %json {"})


def test_no_bias_outweighs_a_grammar(llm: LLM) -> None:
    banned = {token_id: -100.0 for token_id in range(300)}
    (output,) = llm.generate("x", SamplingParams(grammar=choice_grammar(["a"]), logit_bias=banned, temperature=0))
    assert output.outputs[0].text == "a"  # -100 is little beside minus infinity


def test_masks_allow_what_may_come_next(tokenizer: Tokenizer, grammars: Grammars) -> None:
    matcher = grammars.new_matcher(choice_grammar(["ab", "ac"]))
    words = np.zeros((1, -(-tokenizer.vocab_size // 32)), dtype=np.uint32)

    def allowed() -> set[str]:
        grammars.fill_masks([matcher], words)
        bits = np.unpackbits(words[0].view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        return {tokenizer.decode([int(token_id)], skip_special=False) for token_id in np.flatnonzero(bits)}

    assert "a" in allowed() and "b" not in allowed()
    assert not grammars.accept(matcher, tokenizer.encode("a", add_bos=False)[0])
    assert allowed() == {"b", "c"}
    assert grammars.accept(matcher, tokenizer.encode("c", add_bos=False)[0])


def test_masks_do_not_depend_on_slices(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Within strings of every length that is left, and beyond: as where each token is tried by itself."""
    grammar = json_schema_grammar({"type": "object", "properties": {"a": {"type": "string", "maxLength": 35}}})
    matcher = grammars.new_matcher(grammar)
    vocabulary = grammars._read_vocabulary()
    alone = llguidance.LLMatcher(vocabulary.with_slices([]), grammar)
    sliced = np.zeros((1, -(-tokenizer.vocab_size // 32)), dtype=np.uint32)
    for token_id in tokenizer.encode('{"a": "' + "x" * 35 + '"', add_bos=False):
        grammars.fill_masks([matcher], sliced)
        assert sliced.tobytes() == alone.compute_bitmask()[: sliced.nbytes]
        assert alone.consume_token(token_id) and not grammars.accept(matcher, token_id)


def test_compiled_grammars_are_kept_to_a_bound(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    first = choice_grammar(["0"])
    assert not grammars.is_compiled(first)
    for number in range(MAX_CACHED_GRAMMARS + 1):
        grammars.check(choice_grammar([str(number)]))
    assert not grammars.is_compiled(first) and grammars.is_compiled(choice_grammar(["7"]))
    grammars.new_matcher(first)  # compiled again
    assert grammars.is_compiled(first)


def test_what_cannot_be_compiled(grammars: Grammars) -> None:
    for grammar in (regex_grammar("(unclosed"), lark_grammar("start: undefined_rule")):
        with pytest.raises(InvalidRequestError):
            grammars.check(grammar)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        lark_grammar("nonsense ((")
    with pytest.raises(InvalidRequestError, match="characters; at most"):
        grammars.check(choice_grammar(["x" * 300_000]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"regexp": "a"},
        {"choice": []},
        {"choice": [""]},
        {"choice": "ab"},
        {"regex": 5},
        {"json": "{"},
        {"json": {"type": "string", "not": {}}},
    ],
)
def test_wrong_structured_outputs(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        structured_output_grammar(options)


def test_structured_outputs() -> None:
    assert structured_output_grammar({"json": '{"type": "null"}'}) == json_schema_grammar({"type": "null"})
    assert structured_output_grammar({"json_object": True, "regex": None}) == json_object_grammar()


def test_recursion_is_followed_to_a_bound() -> None:
    plain = SUPPORTED["nested references"]
    assert bounded_recursion(plain) is plain
    data = {"const": {"$ref": "#"}}
    assert bounded_recursion(data) is data
    unrolled = bounded_recursion(SUPPORTED["reference to the root"])
    value: dict[str, Any] = {"id": 0}
    for depth in range(MAX_RECURSION + 3):
        fits = not list(Draft202012Validator(unrolled).iter_errors(value))
        assert fits == (depth <= MAX_RECURSION), depth
        value = {"id": 0, "parent": value}
