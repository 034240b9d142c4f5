"""Log-probabilities and the parameters of the text side, through `LLM` on the tiny model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ropeway import LLM, SamplingParams
from ropeway.core.plan import TokenLogprobs
from ropeway.outputs import RequestOutput

PROMPT = list(range(10, 90))


@pytest.fixture(scope="module")
def llm(tiny_model_path: Path) -> LLM:
    return LLM(tiny_model_path, max_model_len=256, num_kv_blocks=32, max_num_seqs=8, max_num_batched_tokens=33)


def run(llm: LLM, prompt: object, **options: object) -> RequestOutput:
    (output,) = llm.generate([prompt], SamplingParams(**{"ignore_eos": True, "max_tokens": 6, **options}))  # type: ignore[arg-type, list-item]
    return output


def test_scores_of_a_prompt_are_those_of_drawing_it(llm: LLM) -> None:
    """Chunked (80 tokens in steps of 33) or not, the scores of tokens 1..n are those that decoding them gave."""
    whole = run(llm, PROMPT[:60], temperature=0, max_tokens=20, logprobs=3)
    drawn = whole.outputs[0]
    assert drawn.logprobs is not None and [each.token_id for each in drawn.logprobs] == drawn.token_ids
    again = run(llm, [*PROMPT[:60], *drawn.token_ids], max_tokens=1, prompt_logprobs=3)
    assert again.prompt_logprobs is not None and again.prompt_logprobs[0] is None
    assert len(again.prompt_logprobs) == 80
    assert again.prompt_logprobs[60:] == drawn.logprobs  # bit for bit
    assert again.outputs[0].logprobs is None


def test_alternatives_are_ordered_and_hold_the_greedy_token(llm: LLM) -> None:
    output = run(llm, PROMPT, temperature=0, logprobs=20).outputs[0]
    assert output.logprobs is not None
    for each in output.logprobs:
        assert (each.rank, each.top_ids[0], each.top_logprobs[0]) == (1, each.token_id, each.logprob)
        assert list(each.top_logprobs) == sorted(each.top_logprobs, reverse=True) and len(set(each.top_ids)) == 20
        assert sum(map(math.exp, each.top_logprobs)) < 1


def test_of_raw_logits_whatever_is_done_to_them(llm: LLM) -> None:
    raw = run(llm, PROMPT, temperature=0, logprobs=5, max_tokens=1).outputs[0].logprobs
    bias = {300: 50.0}
    for options in ({"temperature": 5, "seed": 1}, {"logit_bias": bias}, {"temperature": 0.1, "repetition_penalty": 2}):
        changed = run(llm, PROMPT, logprobs=5, max_tokens=1, **options).outputs[0].logprobs
        assert raw is not None and changed is not None
        assert (changed[0].top_ids, changed[0].top_logprobs) == (raw[0].top_ids, raw[0].top_logprobs)
    biased = run(llm, PROMPT, logprobs=0, max_tokens=1, logit_bias=bias).outputs[0].logprobs
    assert biased is not None and biased[0].token_id == 300 and biased[0].rank > 1 and biased[0].top_ids == ()


def test_asking_changes_no_tokens(llm: LLM) -> None:
    plain = SamplingParams(seed=3, n=2, max_tokens=12, ignore_eos=True)
    asking = SamplingParams(seed=3, n=2, max_tokens=12, ignore_eos=True, logprobs=4, prompt_logprobs=0)
    outputs = llm.generate([PROMPT, PROMPT, PROMPT[:5]], [plain, asking, plain])
    assert [each.token_ids for each in outputs[0].outputs] == [each.token_ids for each in outputs[1].outputs]
    scored = outputs[1].prompt_logprobs
    assert scored is not None and len(scored) == 80
    assert [each.token_id for each in scored[1:] if each] == PROMPT[1:]
    assert outputs[0].prompt_logprobs is None


def test_a_cached_prompt_is_scored_all_the_same(llm: LLM) -> None:
    first = run(llm, PROMPT, prompt_logprobs=2, max_tokens=1)
    assert run(llm, PROMPT, prompt_logprobs=2, max_tokens=1).prompt_logprobs == first.prompt_logprobs


def test_scores_survive_preemption(tiny_model_path: Path) -> None:
    """A pool too small for everybody's answers: prompts run again, and no score comes twice."""
    small = LLM(
        tiny_model_path,
        max_model_len=256,
        num_kv_blocks=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        admission="optimistic",
    )
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    prompts = [PROMPT[number : number + 30] for number in range(6)]
    together = small.generate(prompts, params)
    assert small.stats().num_preemptions > 0
    for prompt, output in zip(prompts, together, strict=True):
        assert output == alone_with_id(small, prompt, params, output)


def alone_with_id(llm: LLM, prompt: list[int], params: SamplingParams, like: RequestOutput) -> RequestOutput:
    (output,) = llm.generate([prompt], params)
    return RequestOutput(
        like.request_id, output.prompt, output.prompt_token_ids, output.outputs, True, like.seed, output.prompt_logprobs
    )


def test_max_tokens_0_only_reads_the_prompt(llm: LLM) -> None:
    output = run(llm, PROMPT, max_tokens=0, prompt_logprobs=1)
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [], "length")
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 80
    full = run(llm, [7] * 256, max_tokens=0, n=2)
    assert [each.finish_reason for each in full.outputs] == ["length", "length"]


def test_bad_words_are_not_completed(llm: LLM) -> None:
    free = run(llm, "ropeway", temperature=0, max_tokens=30).outputs[0]
    word = free.text[4:7]
    assert word in free.text
    bound = run(llm, "ropeway", temperature=0, max_tokens=30, bad_words=[word]).outputs[0]
    assert word not in bound.text
    # Up to the word nothing changes: only the token that would complete it is banned.
    start = free.text.index(word)
    assert bound.text.startswith(free.text[: start + len(word) - 1])
    letter = next(
        character for character in free.text if character.isascii() and character.isprintable() and character != " "
    )
    single = run(llm, "ropeway", temperature=0, max_tokens=30, bad_words=[letter]).outputs[0]
    assert letter not in single.text


def test_the_stop_string_may_be_shown(llm: LLM) -> None:
    free = run(llm, "ropeway", seed=8, max_tokens=40).outputs[0]
    stop = free.text[9:12]
    cut = run(llm, "ropeway", seed=8, max_tokens=40, stop=[stop]).outputs[0]
    shown = run(llm, "ropeway", seed=8, max_tokens=40, stop=[stop], include_stop_str_in_output=True).outputs[0]
    assert shown.text == cut.text + stop and shown.token_ids == cut.token_ids
    by_id = {"stop_token_ids": [free.token_ids[5]]}
    hidden = run(llm, "ropeway", seed=8, **by_id, max_tokens=40).outputs[0]
    visible = run(llm, "ropeway", seed=8, **by_id, include_stop_str_in_output=True, max_tokens=40).outputs[0]
    assert visible.token_ids == hidden.token_ids and visible.text.startswith(hidden.text)
    assert visible.text == llm.tokenizer.decode(visible.token_ids)


def test_special_tokens_may_be_shown(llm: LLM) -> None:
    (special,) = sorted(llm.tokenizer.special_token_ids)[:1]
    options = {"max_tokens": 2, "temperature": 0, "logit_bias": {special: 100.0}}
    assert run(llm, "x", **options).outputs[0].text == ""
    text = run(llm, "x", **options, skip_special_tokens=False).outputs[0].text
    assert text == 2 * llm.tokenizer.token_text(special)


def test_logprobs_end_with_the_stop_string(llm: LLM) -> None:
    free = run(llm, "ropeway", seed=8, max_tokens=40, logprobs=1).outputs[0]
    cut = run(llm, "ropeway", seed=8, max_tokens=40, logprobs=1, stop=[free.text[9:12]]).outputs[0]
    assert cut.logprobs is not None and free.logprobs is not None
    assert cut.logprobs == free.logprobs[: len(cut.token_ids)]
    assert all(isinstance(each, TokenLogprobs) for each in cut.logprobs)
