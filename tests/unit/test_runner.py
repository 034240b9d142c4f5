"""The runner: what the backend is given, what comes back, and what is kept between steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ropeway.backends.batch import Float32Array, ForwardBatch, SampleBatch, Samples
from ropeway.core.params import Request, SamplingParams
from ropeway.core.plan import BlockGrants, StepPlan, StepResult
from ropeway.engine.runner import Runner
from support.fake_backend import BlockTableCorruption, FakeBackend


class RecordingBackend(FakeBackend):
    """Keeps the batches, and fails the rows it is told to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.forward_batches: list[ForwardBatch] = []
        self.sample_batches: list[SampleBatch] = []
        self.failing_rows: set[int] = set()

    def forward(self, batch: ForwardBatch) -> Float32Array:
        self.forward_batches.append(batch)
        return super().forward(batch)

    def sample(self, logits: Float32Array, batch: SampleBatch) -> Samples:
        self.sample_batches.append(batch)
        logits[list(self.failing_rows)] = -np.inf
        return super().sample(logits, batch)


def request(prompt: list[int], *, max_tokens: int = 8, stop: frozenset[int] = frozenset(), **params: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        seed=params.get("seed", 0),
        stop_token_ids=stop,
    )


def plan(
    *rows: tuple[int, int, int, bool, list[int]],
    preempted_ids: tuple[int, ...] = (),
    finished_ids: tuple[int, ...] = (),
) -> StepPlan:
    """rows: (sequence id, start, tokens, sampled, granted blocks)."""
    indptr = np.cumsum([0, *(len(blocks) for *_, blocks in rows)]).tolist()
    return StepPlan(
        step_id=7,
        sequence_ids=tuple(r[0] for r in rows),
        starts=tuple(r[1] for r in rows),
        num_tokens=tuple(r[2] for r in rows),
        is_sampled=tuple(r[3] for r in rows),
        grants=(BlockGrants(tuple(indptr), tuple(b for r in rows for b in r[4])),),
        preempted_ids=preempted_ids,
        finished_ids=finished_ids,
    )


def step(runner: Runner, *rows: tuple[int, int, int, bool, list[int]], **ids: tuple[int, ...]) -> StepResult:
    runner.launch(plan(*rows, **ids))
    return runner.collect()


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend(num_kv_blocks=32, block_size=4)


@pytest.fixture
def runner(backend: RecordingBackend) -> Runner:
    return Runner(backend, max_num_seqs=4, max_model_len=24)


def test_decode_and_chunked_prefill_share_a_step(backend: RecordingBackend, runner: Runner) -> None:
    a, b = [1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4, 3]
    runner.add(0, request(a), 0)
    runner.add(1, request(b), 0)
    first = step(runner, (0, 0, 5, True, [10, 11]))
    assert first == StepResult(7, (0,), backend.expected_tokens(a, 1))
    second = step(runner, (0, 5, 1, True, []), (1, 0, 6, False, [3, 2]))
    assert second == StepResult(7, (0,), backend.expected_tokens(a, 2)[1:])
    third = step(runner, (0, 6, 1, True, []), (1, 6, 1, True, []))
    assert third.sequence_ids == (0, 1)
    assert third.token_ids == (backend.expected_tokens(a, 3)[2], *backend.expected_tokens(b, 1))
    assert runner.token_ids(0) == (*a, *backend.expected_tokens(a, 3))

    batch = backend.forward_batches[1]
    assert batch.token_ids.tolist() == [first.token_ids[0], *b[:6]]
    assert batch.positions.tolist() == [5, 0, 1, 2, 3, 4, 5]
    assert batch.query_indptr.tolist() == [0, 1, 7]
    assert batch.kv_lens.tolist() == [6, 6]
    assert batch.out_rows.tolist() == [0]
    tables = batch.tables[0]
    assert tables.block_ids[tables.offsets[0] :][:2].tolist() == [10, 11]
    assert tables.block_ids[tables.offsets[1] :][:2].tolist() == [3, 2]
    arrays = [batch.token_ids, batch.positions, batch.query_indptr, batch.kv_lens, batch.out_rows, tables.block_ids]
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)} and tables.offsets.dtype == np.int64


def test_a_step_without_samples_has_an_empty_result(backend: RecordingBackend, runner: Runner) -> None:
    runner.add(0, request([1, 2, 3]), 0)
    assert step(runner, (0, 0, 2, False, [0])) == StepResult(7, (), ())
    assert not backend.sample_batches


def test_a_preempted_sequence_keeps_its_tokens_and_loses_its_blocks(backend: RecordingBackend, runner: Runner) -> None:
    a, b = [1, 2, 3], [4, 5]
    runner.add(0, request(a), 0)
    runner.add(1, request(b), 0)
    step(runner, (0, 0, 3, True, [0]), (1, 0, 2, True, [1]))
    step(runner, (0, 3, 1, True, []), preempted_ids=(1,))
    step(runner, (0, 4, 1, True, [1]))  # takes the block that sequence 1 lost
    result = step(runner, (0, 5, 1, True, []), (1, 0, 3, True, [5]))  # recomputes prompt and output in new blocks
    assert result.token_ids == (backend.expected_tokens(a, 4)[3], backend.expected_tokens(b, 2)[1])


def test_preempted_and_readmitted_in_one_plan(backend: RecordingBackend, runner: Runner) -> None:
    runner.add(0, request([1, 2, 3]), 0)
    step(runner, (0, 0, 3, True, [0]))
    result = step(runner, (0, 0, 4, True, [8]), preempted_ids=(0,))
    assert result.token_ids == backend.expected_tokens([1, 2, 3], 2)[1:]
    tables = backend.forward_batches[-1].tables[0]
    assert tables.block_ids[tables.offsets[0]] == 8


def test_a_finished_sequence_frees_its_slot(runner: Runner) -> None:
    for sequence_id in range(20):
        runner.add(sequence_id, request([1, 2, 3]), 0)
        ended = (sequence_id - 1,) if sequence_id else ()
        step(runner, (sequence_id, 0, 3, True, [0]), finished_ids=ended)
        assert runner.num_slots_used == 1


def test_sequences_end_before_they_run_or_while_preempted(runner: Runner) -> None:
    for sequence_id in range(3):
        runner.add(sequence_id, request([1, 2]), 0)
    step(runner, (0, 0, 2, True, [0]), (1, 0, 2, True, [1]))
    step(runner, (0, 2, 1, True, []), preempted_ids=(1,), finished_ids=(1, 2))
    assert runner.num_slots_used == 1


def test_more_sequences_than_slots(backend: RecordingBackend) -> None:
    runner = Runner(backend, max_num_seqs=2, max_model_len=24)
    prompts = [[i, i + 1, i + 2] for i in range(9)]
    for i, prompt in enumerate(prompts):
        runner.add(i, request(prompt, logit_bias={63: -5.0}), 0)
        previous = [(i - 1, 3, 1, True, [])] if i else []
        step(runner, *previous, (i, 0, 3, True, [i]))
    result = step(runner, (7, 4, 1, True, [20]), (8, 3, 1, True, []))
    assert result.token_ids == (backend.expected_tokens(prompts[7], 3)[2], backend.expected_tokens(prompts[8], 2)[1])
    assert [runner.token_ids(i)[:4] for i in range(9)] == [(*p, *backend.expected_tokens(p, 1)) for p in prompts]


def test_sampling_parameters_reach_the_backend_by_row(backend: RecordingBackend, runner: Runner) -> None:
    stop = frozenset({5, 2})
    b = request(
        [4, 5, 6],
        max_tokens=9,
        stop=stop,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={7: 2.0, 1: -3.0},
        min_tokens=2,
        seed=2**64 - 1,
    )
    runner.add(0, request([1], seed=5), 0)
    runner.add(1, b, 3)
    step(runner, (0, 0, 1, True, [0]), (1, 0, 3, True, [1]))
    batch = backend.sample_batches[-1]
    assert batch.temperature.tolist() == [1.0, 0.5]
    assert batch.top_k.tolist() == [0, 3]
    assert batch.top_p.tolist() == [1.0, 0.75]
    assert batch.min_p.tolist() == [0.0, 0.25]
    assert batch.seed.tolist() == [5, 2**64 - 1]
    assert batch.index.tolist() == [0, 3]
    assert batch.position.tolist() == [1, 3]
    assert batch.repetition_penalty.tolist() == [1.0, 1.5]
    assert batch.presence_penalty.tolist() == [0.0, 0.5]
    assert batch.frequency_penalty.tolist() == [0.0, -0.5]
    assert batch.num_prompt_tokens.tolist() == [1, 3]
    assert batch.num_tokens.tolist() == [1, 3]
    assert batch.history[batch.history_offsets[1] :][:3].tolist() == [4, 5, 6]
    assert (batch.bias_indptr.tolist(), batch.bias_ids.tolist()) == ([0, 0, 2], [7, 1])
    assert batch.bias_values.tolist() == [2.0, -3.0]
    assert (batch.banned_indptr.tolist(), batch.banned_ids.tolist()) == ([0, 0, 2], [2, 5])
    assert all(array.flags.c_contiguous for array in (batch.temperature, batch.top_k, batch.frequency_penalty))

    step(runner, (1, 3, 1, True, []))  # one token so far: the end is still masked
    assert backend.sample_batches[-1].banned_ids.tolist() == [2, 5]
    step(runner, (1, 4, 1, True, [9]), (0, 1, 1, True, []))  # two tokens: no longer
    batch = backend.sample_batches[-1]
    assert (batch.banned_indptr.tolist(), batch.bias_indptr.tolist()) == ([0, 0, 0], [0, 2, 2])
    assert (batch.position.tolist(), batch.num_prompt_tokens.tolist()) == ([5, 2], [3, 1])


def test_a_slot_taken_over_inherits_nothing(backend: RecordingBackend) -> None:
    runner = Runner(backend, max_num_seqs=1, max_model_len=24)
    runner.add(0, request([4], logit_bias={7: 2.0}, min_tokens=3, stop=frozenset({1}), top_k=5), 2)
    step(runner, (0, 0, 1, True, [0]))
    runner.add(1, request([4, 3]), 0)
    step(runner, (1, 0, 2, True, [0]), finished_ids=(0,))
    batch = backend.sample_batches[-1]
    assert len(batch.bias_ids) == len(batch.banned_ids) == 0
    assert (batch.top_k.tolist(), batch.index.tolist(), batch.num_tokens.tolist()) == ([0], [0], [2])


def test_rows_follow_when_sequences_change_places(backend: RecordingBackend, runner: Runner) -> None:
    """What is gathered for a set of rows is kept from step to step, and must not outlive the set or its order."""
    histories = {0: [1, 2, 3], 1: [4, 5], 2: [6, 7]}
    for sequence_id, prompt in histories.items():
        stop = frozenset({60 + sequence_id})
        asked = request(prompt, temperature=0.1 * sequence_id, top_k=sequence_id, min_tokens=sequence_id, stop=stop)
        runner.add(sequence_id, asked, 0)
    orders = [(0, 1), (0, 1), (1, 0), (1, 2), (2, 1), (2, 1), (2,), (0, 2)]
    has_blocks: set[int] = set()
    for order in orders:
        rows = []
        for sequence_id in order:
            history = histories[sequence_id]
            is_first = sequence_id not in has_blocks
            has_blocks.add(sequence_id)
            blocks = list(range(6 * sequence_id, 6 * sequence_id + 4)) if is_first else []
            rows.append(
                (sequence_id, 0 if is_first else len(history) - 1, len(history) if is_first else 1, True, blocks)
            )
        drawn = step(runner, *rows)
        assert drawn.sequence_ids == order
        sampled = backend.sample_batches[-1]
        assert sampled.top_k.tolist() == list(order)
        assert sampled.position.tolist() == [len(histories[sequence_id]) for sequence_id in order]
        num_prompt = {0: 3, 1: 2, 2: 2}
        is_masked = [len(histories[i]) - num_prompt[i] < i for i in order]
        assert np.diff(sampled.banned_indptr).tolist() == [int(masked) for masked in is_masked]
        for sequence_id, token_id in zip(order, drawn.token_ids, strict=True):
            histories[sequence_id].append(token_id)
    assert {i: list(runner.token_ids(i)) for i in histories} == histories


def test_a_failed_row_is_reported_and_feeds_nothing_back(backend: RecordingBackend, runner: Runner) -> None:
    for i in range(3):
        runner.add(i, request([i, 5]), 0)
    backend.failing_rows = {1}
    result = step(runner, *((i, 0, 2, True, [i]) for i in range(3)))
    assert (result.sequence_ids, result.failed_sequence_ids) == ((0, 2), (1,))
    assert result.token_ids == tuple(backend.expected_tokens([i, 5], 1)[0] for i in (0, 2))
    assert runner.token_ids(1) == (1, 5)
    backend.failing_rows = set()
    result = step(runner, (0, 2, 1, True, []), (2, 2, 1, True, []), finished_ids=(1,))
    assert result.token_ids == tuple(backend.expected_tokens([i, 5], 2)[1] for i in (0, 2))


def test_a_sequence_fills_its_context(backend: RecordingBackend) -> None:
    runner = Runner(backend, max_num_seqs=1, max_model_len=10)
    runner.add(0, request([1, 2, 3], max_tokens=7), 0)
    step(runner, (0, 0, 3, True, [0]))
    for position in range(3, 9):
        step(runner, (0, position, 1, True, [position] if position % 4 == 0 else []))
    assert runner.token_ids(0) == (1, 2, 3, *backend.expected_tokens([1, 2, 3], 7))


def test_a_padding_row_draws_its_last_token_again(runner: Runner) -> None:
    runner.add(0, request([1, 2, 3]), 0)
    step(runner, (0, 0, 3, True, [0]))
    step(runner, (0, 3, 1, True, []))
    tokens = runner.token_ids(0)
    for _ in range(2):
        assert step(runner, (0, 3, 1, True, [])) == StepResult(7, (0,), tokens[-1:])
        assert runner.token_ids(0) == tokens


def test_what_a_failed_step_announced_may_be_announced_again(runner: Runner) -> None:
    runner.add(0, request([1, 2, 3]), 0)
    runner.add(1, request([4, 5]), 0)
    step(runner, (0, 0, 3, True, [0]))
    for num_tokens in (2, 3):
        step(runner, (1, 0, num_tokens, True, [1]), preempted_ids=(0, 1), finished_ids=(0, 7))
        assert runner.num_slots_used == 1


def test_block_reuse_while_held_is_caught(runner: Runner) -> None:
    runner.add(0, request([1, 2, 3]), 0)
    runner.add(1, request([7, 2, 3]), 0)
    step(runner, (0, 0, 3, True, [0]))
    step(runner, (1, 0, 3, True, [0]))
    with pytest.raises(BlockTableCorruption):
        step(runner, (0, 3, 1, True, []))


@pytest.mark.parametrize(
    "bad",
    [
        plan((0, 0, 4, True, [0])),  # beyond the known tokens
        plan((0, 0, 2, True, [0])),  # sampled before its last token
        plan((0, 0, 3, True, [])),  # without a block
        plan((0, 0, 3, True, list(range(7)))),  # more blocks than the context holds
    ],
)
def test_an_impossible_plan_is_refused(runner: Runner, bad: StepPlan) -> None:
    runner.add(0, request([1, 2, 3]), 0)
    with pytest.raises(AssertionError):
        runner.launch(bad)


def test_launch_and_collect_alternate(runner: Runner) -> None:
    with pytest.raises(AssertionError):
        runner.collect()
    runner.add(0, request([1, 2, 3]), 0)
    runner.launch(plan((0, 0, 3, True, [0])))
    with pytest.raises(AssertionError):
        runner.launch(plan((0, 3, 1, True, [])))


def test_a_launch_that_fails_leaves_the_store_as_it_was(backend: RecordingBackend) -> None:
    runner = Runner(backend, max_num_seqs=1, max_model_len=24)
    runner.add(0, request([1, 2]), 0)
    step(runner, (0, 0, 2, True, [3]))
    step(runner, (0, 2, 1, True, []))
    runner.add(1, request([1] * 24), 0)
    with pytest.raises(AssertionError, match="exceeds the context"):
        step(runner, (0, 3, 1, True, []), (1, 0, 2, False, [5]))
    runner.add(2, request([4, 4]), 0)  # for which the storage grows
    result = step(runner, (0, 3, 1, True, []), (2, 0, 2, True, [5]), finished_ids=(1,))
    assert result.token_ids == (backend.expected_tokens([1, 2], 3)[2], *backend.expected_tokens([4, 4], 1))


def test_a_row_that_lacks_blocks_is_refused_and_goes_on_with_them(backend: RecordingBackend, runner: Runner) -> None:
    runner.add(0, request([1, 2]), 0)
    step(runner, (0, 0, 2, True, [3]))
    step(runner, (0, 2, 1, True, []))
    step(runner, (0, 3, 1, True, []))
    with pytest.raises(AssertionError, match="lacks blocks"):
        step(runner, (0, 4, 1, True, []))
    step(runner, (0, 4, 1, True, [5]))
    backend.failing_rows = {0}
    assert step(runner, (0, 5, 1, True, [])).failed_sequence_ids == (0,)
    assert len(runner.token_ids(0)) == 6
