"""`LLM` and `AsyncLLM` on a tiny random model: shapes, order, stop strings, bad input, aborts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.random_gguf import RandomModel, write_random_gguf

import ropeway
from ropeway import LLM, AsyncLLM, RequestOutput, SamplingParams
from ropeway.core.decision_log import AbortRecord, DecisionLog
from ropeway.errors import (
    ConfigError,
    EngineStoppedError,
    InvalidRequestError,
    ModelFetchError,
    ModelFileError,
    RequestTooLargeError,
)
from ropeway.model.gguf import GgufFile
from ropeway.sim.replay import Replay

OPTIONS = {"max_num_batched_tokens": 64, "num_kv_blocks": 64, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model_path: Path) -> LLM:
    return LLM(tiny_model_path, **OPTIONS)


@pytest.fixture(autouse=True)
def no_blocks_are_left_behind(llm: LLM) -> Iterator[None]:
    yield
    stats = llm.stats()
    assert (stats.num_used_blocks, stats.num_running, stats.num_waiting, stats.num_failed_steps) == (0, 0, 0, 0)


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["short", [5, 6, 7], {"prompt_token_ids": [9]}, "a longer prompt " * 8]
    together = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in together] == ["short", None, None, "a longer prompt " * 8]
    assert [output.prompt_token_ids for output in together[1:3]] == [[5, 6, 7], [9]]
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert alone.outputs == output.outputs
        assert output.finished and output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 12


def test_text_is_the_decoding_of_the_tokens(llm: LLM) -> None:
    for output in llm.generate(["one", "two"], SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)):
        assert [each.index for each in output.outputs] == [0, 1, 2]
        for each in output.outputs:
            assert each.text == llm.tokenizer.decode(each.token_ids)


def test_seeds(llm: LLM) -> None:
    first, again, other = (
        llm.generate("x", SamplingParams(seed=seed, max_tokens=16, n=2, ignore_eos=True))[0] for seed in (1, 1, 2)
    )
    assert first.outputs == again.outputs != other.outputs
    assert first.outputs[0].token_ids != first.outputs[1].token_ids
    drawn = llm.generate("x", SamplingParams(max_tokens=16, n=2, ignore_eos=True))[0]
    repeated = llm.generate("x", SamplingParams(max_tokens=16, n=2, ignore_eos=True, seed=drawn.seed))[0]
    assert drawn.outputs == repeated.outputs


def test_a_negative_seed_is_a_seed(llm: LLM) -> None:
    (output,) = llm.generate("x", SamplingParams(seed=-1, max_tokens=2))
    assert output.seed == 2**64 - 1


def test_stop_string(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=60, ignore_eos=True)
    (whole,) = llm.generate("stop here", params)
    text = whole.outputs[0].text
    stop = text[10:12]
    end = text.index(stop)
    stopping = SamplingParams(seed=3, max_tokens=60, ignore_eos=True, stop=[stop])
    (cut,) = llm.generate("stop here", stopping)
    completion = cut.outputs[0]
    assert (completion.text, completion.finish_reason) == (text[:end], "stop")
    num_tokens = len(completion.token_ids)
    assert completion.token_ids == whole.outputs[0].token_ids[:num_tokens]
    assert stop in llm.tokenizer.decode(completion.token_ids)
    assert stop not in llm.tokenizer.decode(completion.token_ids[:-1])


def test_stop_token_is_counted_and_not_shown(llm: LLM) -> None:
    (whole,) = llm.generate("hello", GREEDY)
    token_ids = whole.outputs[0].token_ids
    stop_id = token_ids[5]
    first = token_ids.index(stop_id)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop_id])
    (cut,) = llm.generate("hello", params)
    assert cut.outputs[0].token_ids == token_ids[: first + 1]
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].text == llm.tokenizer.decode(token_ids[:first])


def test_model_end_token_ends_unless_ignored(llm: LLM) -> None:
    eos = next(iter(llm.tokenizer.eos_token_ids))
    bias = {eos: 100.0}
    (ended,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=9, logit_bias=bias))
    assert (ended.outputs[0].token_ids, ended.outputs[0].text, ended.outputs[0].finish_reason) == ([eos], "", "stop")
    (ignored,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=9, logit_bias=bias, ignore_eos=True))
    assert (ignored.outputs[0].token_ids, ignored.outputs[0].finish_reason) == ([eos] * 9, "length")
    (later,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=9, logit_bias=bias, min_tokens=3))
    assert len(later.outputs[0].token_ids) == 4 and later.outputs[0].token_ids[-1] == eos


def test_max_tokens_none_fills_the_context(llm: LLM) -> None:
    (output,) = llm.generate([7] * 200, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 56


def test_one_params_per_prompt(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], each)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(InvalidRequestError, match="3 prompts but 2"):
        llm.generate(["a", "b", "c"], each[:2])


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, GREEDY)
    assert one.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    two = llm.chat([conversation, [{"role": "user", "content": "other"}]], GREEDY)
    assert two[0].outputs == one.outputs and len(two) == 2
    with pytest.raises(InvalidRequestError, match="at least one|hold"):
        llm.chat([], GREEDY)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("", GREEDY, "empty"),
        ([[]], GREEDY, "empty"),
        ([[320]], GREEDY, "ids 0 to 319"),
        ([[-1]], GREEDY, "ids 0 to 319"),
        ([[True]], GREEDY, "integers"),
        ([[1.5]], GREEDY, "integers"),
        ([{"text": "x"}], GREEDY, "key"),
        ([object()], GREEDY, "text or a list of token ids"),
        ([b"bytes"], GREEDY, "text or a list of token ids"),
        ("half a pair \ud800", GREEDY, "Unicode"),
        ("x", SamplingParams(stop_token_ids=[999]), "stop_token_ids"),
        ("x", SamplingParams(logit_bias={999: 1.0}), "logit_bias"),
        ([[5] * 256], SamplingParams(max_tokens=None), "256"),
        ([[5] * 250], SamplingParams(max_tokens=7), "250 tokens and max_tokens is 7.* 257.* 256.* at most 6"),
        ([[5] * 250], SamplingParams(max_tokens=None, min_tokens=7), "min_tokens is 7"),
    ],
)
def test_bad_input_starts_nothing(llm: LLM, prompt: object, params: SamplingParams, message: str) -> None:
    num_steps = llm.stats().num_steps
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(["fine", *prompt] if isinstance(prompt, list) else ["fine", prompt], params)  # type: ignore[list-item]
    assert llm.stats().num_steps == num_steps


def test_too_large_is_told_apart(llm: LLM) -> None:
    with pytest.raises(RequestTooLargeError):
        llm.generate([[5] * 300], GREEDY)


def test_leaving_generate_each_early_aborts(llm: LLM) -> None:
    items = (("prompt", SamplingParams(max_tokens=4 + n, ignore_eos=True)) for n in range(20))
    iterator = llm.generate_each(items)
    position, output = next(iterator)
    assert position == 0 and output.finished
    iterator.close()
    assert llm.stats().num_used_blocks == 0


def test_generate_each_reads_only_as_far_as_it_can_run(tiny_model_path: Path) -> None:
    llm = LLM(tiny_model_path, max_num_batched_tokens=8, max_num_seqs=2, num_kv_blocks=64)
    num_read = 0

    def items() -> Iterator[tuple[str, SamplingParams]]:
        nonlocal num_read
        for _ in range(100):
            num_read += 1
            yield "x", SamplingParams(max_tokens=2, ignore_eos=True)

    iterator = llm.generate_each(items())
    next(iterator)
    assert num_read <= 6
    assert len(list(iterator)) == 99


def test_small_pool_gives_a_small_context(tiny_model_path: Path) -> None:
    llm = LLM(tiny_model_path, max_num_batched_tokens=64, num_kv_blocks=4)
    assert llm.facts.max_model_len == 64 and llm.facts.warnings
    (output,) = llm.generate("x", SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64
    with pytest.raises(RequestTooLargeError, match="effective context of 64|effective context is 64"):
        llm.generate([[5] * 60], SamplingParams(max_tokens=5))


def test_unknown_option_and_model(tiny_model_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(tiny_model_path, max_model_length=5)
    with pytest.raises(ModelFetchError, match="no-such-model"):
        LLM("no-such-model")


def test_head_beyond_the_vocabulary_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    """Drawn, such an id would have no text."""
    whole = GgufFile.open(tiny_model_path).metadata
    shortened = {key: whole[key][:300] for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")}  # type: ignore[index]
    path = write_random_gguf(tmp_path / "m.gguf", RandomModel(vocab_size=320, metadata=shortened))
    with pytest.raises(ModelFileError, match="320 tokens but the tokenizer has 300"):
        LLM(path, **OPTIONS)


def test_steps_are_paced_by_what_was_timed_at_load(tiny_model_path: Path) -> None:
    llm = LLM(tiny_model_path, num_kv_blocks=64, slo_tpot_ms=5000.0)
    before = llm.stats().pacing
    assert before is not None and before.costs.token_s > 0 and before.tpot_s == 5.0
    llm.generate(["x", "y"], SamplingParams(max_tokens=4, ignore_eos=True))
    after = llm.stats().pacing
    assert after is not None and after.predicted_s > 0 and after.achieved_s > 0
    assert (after.num_answers, after.num_in_tpot) == (2, 2)


@pytest.mark.parametrize("batching", ["static", "static-padded"])
def test_batching_changes_no_answer(llm: LLM, tiny_model_path: Path, batching: str) -> None:
    static = LLM(tiny_model_path, **OPTIONS, batching=batching, max_num_seqs=3)
    prompts = [f"prompt {number}" for number in range(7)]
    params = [SamplingParams(temperature=0, max_tokens=3 + number, ignore_eos=True) for number in range(7)]
    answers = [output.outputs for output in static.generate(prompts, params)]
    assert answers == [output.outputs for output in llm.generate(prompts, params)]


def test_package_exports() -> None:
    for name in ropeway.__all__:
        assert getattr(ropeway, name) is not None
    with pytest.raises(AttributeError, match="frobnicate"):
        ropeway.frobnicate  # noqa: B018


def run_async(tiny_model_path: Path, scenario: object) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny_model_path, **OPTIONS) as llm:
            await asyncio.wait_for(scenario(llm), 60)  # type: ignore[operator]
            assert llm.engine.num_open_requests == 0
            assert llm.engine.stats.num_used_blocks == 0

    asyncio.run(run())


def test_async_kinds_of_output_agree(llm: LLM, tiny_model_path: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=11, n=2, max_tokens=15, ignore_eos=True)
    expected = llm.generate("hello", params)[0]

    async def scenario(async_llm: AsyncLLM) -> None:
        cumulative = [output async for output in async_llm.generate("hello", params)]
        assert cumulative[-1].outputs == expected.outputs
        assert [output.finished for output in cumulative] == [False] * (len(cumulative) - 1) + [True]
        lengths = [len(output.outputs[0].token_ids) for output in cumulative]
        assert (
            lengths == sorted(lengths) and lengths[-1] == 15
        )  # how many steps one wake-up brings is up to the machine
        deltas = [output async for output in async_llm.generate("hello", params, output_kind="delta")]
        for index in range(2):
            text = "".join(each.text for output in deltas for each in output.outputs if each.index == index)
            assert text == expected.outputs[index].text
        final = [output async for output in async_llm.generate("hello", params, "my-id", output_kind="final")]
        assert [output.outputs for output in final] == [expected.outputs]
        assert final[0].request_id == "my-id"

    run_async(tiny_model_path, scenario)


def test_async_many_at_once_equal_their_lone_answers(llm: LLM, tiny_model_path: Path) -> None:
    prompts = [f"{number} " * (1 + number % 5) for number in range(24)]
    params = [
        SamplingParams(seed=number, temperature=number % 3, max_tokens=1 + number, stop="e", ignore_eos=True)
        for number in range(24)
    ]
    expected = [llm.generate(prompt, one)[0].outputs for prompt, one in zip(prompts, params, strict=True)]

    async def last(async_llm: AsyncLLM, prompt: str, one: SamplingParams) -> RequestOutput:
        return [output async for output in async_llm.generate(prompt, one)][-1]

    async def scenario(async_llm: AsyncLLM) -> None:
        pairs = zip(prompts, params, strict=True)
        outputs = await asyncio.gather(*(last(async_llm, prompt, one) for prompt, one in pairs))
        assert [output.outputs for output in outputs] == expected
        await until_idle(async_llm)

    run_async(tiny_model_path, scenario)


def test_async_abort_and_close(tiny_model_path: Path) -> None:
    long = SamplingParams(max_tokens=None, ignore_eos=True)

    async def scenario(llm: AsyncLLM) -> None:
        outputs = []
        async for output in llm.generate("abort me", long, "a"):
            outputs.append(output)
            if len(outputs) == 3:
                llm.abort("a")
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        assert 3 <= len(outputs[-1].outputs[0].token_ids) < 200

        stream = llm.generate("close me", long)
        await anext(stream)
        await stream.aclose()
        await until_idle(llm)

        task = asyncio.create_task(anext(llm.generate("cancel me", long, output_kind="final")))
        while not llm.engine.stats.num_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)
        assert llm.engine.metrics.finished["abort"] == 3

    run_async(tiny_model_path, scenario)


def test_async_request_id_in_use(tiny_model_path: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = llm.generate("x", SamplingParams(max_tokens=None, ignore_eos=True), "same")
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="in use"):
            await anext(llm.generate("y", None, "same"))
        await stream.aclose()
        await until_idle(llm)

    run_async(tiny_model_path, scenario)


def test_async_shutdown_lets_requests_finish_or_aborts_them(tiny_model_path: Path) -> None:
    async def one(llm: AsyncLLM, max_tokens: int) -> RequestOutput:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return [output async for output in llm.generate("x", params, output_kind="final")][-1]

    async def run(max_tokens: int, timeout_s: float) -> tuple[bool, RequestOutput]:
        llm = AsyncLLM(tiny_model_path, **OPTIONS)
        task = asyncio.create_task(one(llm, max_tokens))
        while not llm.engine.stats.num_running and not task.done():  # a short answer may end between two looks
            await asyncio.sleep(0.001)
        is_drained = await llm.shutdown(timeout_s)
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await one(llm, 1)
        return is_drained, await task

    is_drained, output = asyncio.run(run(30, 30.0))
    assert is_drained and output.outputs[0].finish_reason == "length"
    is_drained, output = asyncio.run(run(250, 0.0))
    assert not is_drained and output.outputs[0].finish_reason == "abort"


async def until_idle(llm: AsyncLLM) -> None:
    while llm.engine.num_open_requests:
        await asyncio.sleep(0.001)


async def _stream_and_leave(llm: AsyncLLM) -> None:
    async with llm:
        params = SamplingParams(max_tokens=100, n=2, ignore_eos=True)
        async with contextlib.aclosing(llm.generate("long enough for some blocks " * 3, params)) as outputs:
            async for output in outputs:
                if len(output.outputs[0].token_ids) > 5:
                    break
        await asyncio.gather(*(_read(llm, f"prompt {i}") for i in range(4)))


async def _read(llm: AsyncLLM, prompt: str) -> None:
    async for _ in llm.generate(prompt, SamplingParams(max_tokens=9), output_kind="final"):
        pass


def test_the_decision_log_of_an_engine_replays(tiny_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    llm = AsyncLLM(tiny_model_path, **OPTIONS, decision_log=path, decision_log_size="1M")
    asyncio.run(_stream_and_leave(llm))
    replay = Replay(DecisionLog(path.read_bytes()))
    records = [replayed.record for replayed in replay.run()]
    assert replay.stats() == llm.engine.stats
    assert sum(isinstance(record, AbortRecord) for record in records) == 1


def test_a_decision_log_that_cannot_be_written_is_told_at_the_start(tiny_model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the decision log"):
        LLM(tiny_model_path, **OPTIONS, decision_log=tmp_path / "missing" / "run.log")


def test_the_least_that_logits_may_be_divided_by_is_served(tiny_model_path: Path) -> None:
    """What is smaller in float32 than a sampler takes would fail the step, and everybody in it."""
    llm = LLM(tiny_model_path, num_kv_blocks=16, max_num_seqs=2, num_threads=1)
    params = SamplingParams(
        temperature=1e-9, top_p=1e-9, repetition_penalty=1e-9, max_tokens=4, ignore_eos=True, seed=1
    )
    (output,) = llm.generate("x", params)
    assert output.outputs[0].finish_reason == "length" and llm.stats().num_failed_steps == 0
