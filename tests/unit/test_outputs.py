"""Assembly of answers: stop strings cut text and tokens, later events are ignored, streamed equals unstreamed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway.core.params import FinishReason, Request, SamplingParams
from ropeway.core.plan import SequenceEvent
from ropeway.engine.metrics import EngineMetrics, Histogram, RequestTimes
from ropeway.model.gguf import GgufFile
from ropeway.outputs import Assembler, Transcript
from ropeway.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model_path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(GgufFile.open(tiny_model_path).metadata)


def request_for(**options: object) -> Request:
    return Request("r", (5,), SamplingParams(**options), 100, seed=9)  # type: ignore[arg-type]


def event(token_ids: list[int], reason: FinishReason | None = None, index: int = 0) -> SequenceEvent:
    return SequenceEvent("r", index, tuple(token_ids), reason)


def test_stop_string_cuts_tokens_and_asks_for_a_stop(tokenizer: Tokenizer) -> None:
    assembler = Assembler(request_for(stop="cd"), tokenizer)
    ids = tokenizer.encode("abcdef")
    first = assembler.push(event(ids[:3]))
    assert first is not None and (first.text, first.token_ids) == ("ab", tuple(ids[:3]))
    second = assembler.push(event(ids[3:]))
    assert second is not None and second.finish_reason == "stop" and second.is_stopped_by_text
    assert (second.text, second.token_ids) == ("", (ids[3],))
    assert assembler.is_finished
    assert assembler.push(event([7], "abort")) is None


def test_text_stop_wins_over_length_and_needs_no_stop_then(tokenizer: Tokenizer) -> None:
    assembler = Assembler(request_for(stop="bc"), tokenizer)
    delta = assembler.push(event(tokenizer.encode("abc"), "length"))
    assert delta is not None and (delta.text, delta.finish_reason) == ("a", "stop")
    assert not delta.is_stopped_by_text


def test_a_character_cut_short_by_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    for stop, text, reason in (((), "\ufffd", "length"), (("\ufffd",), "", "stop")):
        assembler = Assembler(request_for(stop=stop), tokenizer)
        assert assembler.push(event(ids[:1])).text == ""  # type: ignore[union-attr]
        delta = assembler.push(event([], "length"))
        assert delta is not None and (delta.text, delta.finish_reason) == (text, reason)


def test_tokens_are_counted_through_the_end_of_each_sequence(tokenizer: Tokenizer) -> None:
    """The stop token counts and is no text; of what comes with a stop string, only what completes it."""
    ids = tokenizer.encode("abcdef")
    request = Request("r", (5,), SamplingParams(n=2, stop="cd"), 100, seed=9, stop_token_ids=frozenset({ids[1]}))
    assembler = Assembler(request, tokenizer)
    assembler.push(event(ids[:1], index=0))
    assembler.push(event(ids[2:3], index=1))
    assert assembler.num_generated_tokens == 2
    delta = assembler.push(event(ids[1:2], "stop", index=0))
    assert delta is not None and (delta.text, delta.token_ids) == ("", (ids[1],))
    assert assembler.num_generated_tokens == 3
    delta = assembler.push(event(ids[3:], index=1))
    assert delta is not None and delta.token_ids == (ids[3],)
    assert assembler.num_generated_tokens == 4 and assembler.is_finished


def test_sequences_end_one_by_one(tokenizer: Tokenizer) -> None:
    assembler = Assembler(request_for(n=2), tokenizer)
    assembler.push(event([70], "length", index=1))
    assert assembler.num_unfinished == 1
    assembler.push(event([70, 71], "abort", index=0))
    assert assembler.is_finished


@settings(max_examples=60, deadline=None)
@given(data=st.data(), text=st.text(max_size=40), stop=st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_streamed_is_unstreamed(tokenizer: Tokenizer, data: st.DataObject, text: str, stop: list[str]) -> None:
    ids = tokenizer.encode(text.encode("utf-8", "ignore").decode())
    stop = [each.encode("utf-8", "ignore").decode() or "x" for each in stop]
    request = request_for(stop=stop)
    whole, pieces = Transcript(request, None), Transcript(request, None)
    whole.add(Assembler(request, tokenizer).push(event(ids, "length")))  # type: ignore[arg-type]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    assembler = Assembler(request, tokenizer)
    for start, end in pairwise([0, *cuts, len(ids)]):
        if (delta := assembler.push(event(ids[start:end]))) is not None:
            pieces.add(delta)
    if (delta := assembler.push(event([], "length"))) is not None:
        pieces.add(delta)
    assert pieces.output() == whole.output()
    assert whole.output().finished


def test_histogram_buckets_are_closed_above() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 8.0)


def test_metrics_of_one_request() -> None:
    metrics, times = EngineMetrics(), RequestTimes(arrival_s=10.0, num_prompt_tokens=4)
    metrics.on_scheduled(times, 10.5)
    metrics.on_scheduled(times, 11.0)
    metrics.on_tokens(times, 0, 0, 11.0)
    metrics.on_tokens(times, 0, 1, 12.0)
    metrics.on_tokens(times, 0, 1, 12.25)
    metrics.on_finished(times, "length", 13.0)
    assert metrics.request_queue_time_s.total == 0.5
    assert metrics.time_to_first_token_s.total == 2.0
    assert metrics.inter_token_latency_s.total == 0.25
    assert metrics.e2e_request_latency_s.total == 3.0
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens, metrics.finished["length"]) == (4, 2, 1)
