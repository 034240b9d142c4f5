"""The codec of the decision log: whatever is written is read back, cuts are found, foreign bytes are refused."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropeway.core.decision_log import (
    MAGIC,
    VERSION,
    AbortRecord,
    AddRecord,
    CommitRecord,
    DecisionLog,
    FailRecord,
    LogEncoder,
    PlanRecord,
    Record,
    StopRecord,
)
from ropeway.core.plan import BlockCopies, BlockGrants, LayerSlice, StepPlan
from ropeway.errors import DecisionLogError

OPTIONS = {"policy": "fcfs", "blocks": 64, "share": 0.1, "padded": False, "slo": None, "tenant ü": "", "b": True}

times = st.floats(min_value=0, max_value=1e9)
counts = st.integers(min_value=0, max_value=2**40)
digests = st.lists(st.binary(min_size=8, max_size=8), max_size=4).map(tuple)
ids = st.lists(counts, max_size=5).map(tuple)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Plans over few ids, so that decodes go on from plan to plan, some of them, in many ways."""
    sequence_ids = draw(st.lists(st.integers(0, 6), max_size=6, unique=True))
    rows = [(draw(st.integers(0, 3)), draw(st.sampled_from((1, 1, 1, 5))), draw(st.booleans())) for _ in sequence_ids]
    grants = []
    for _ in range(draw(st.integers(0, 2))):
        indptr = tuple(accumulate([draw(st.integers(0, 2)) for _ in sequence_ids], initial=0))
        grants.append(BlockGrants(indptr, tuple(draw(st.lists(counts, min_size=indptr[-1], max_size=indptr[-1])))))
    return StepPlan(
        draw(counts),
        tuple(sequence_ids),
        tuple(start for start, _, _ in rows),
        tuple(n for _, n, _ in rows),
        tuple(sampled for _, _, sampled in rows),
        tuple(grants),
        draw(ids),
        draw(ids),
        tuple(draw(st.lists(st.builds(BlockCopies, ids, ids), max_size=2))),
        draw(st.none() | st.builds(LayerSlice, st.integers(0, 40), st.integers(1, 40))),
    )


records = st.one_of(
    st.builds(
        AddRecord,
        now_s=times,
        num_prompt_tokens=counts,
        max_tokens=counts,
        num_sequences=counts,
        may_end_early=st.booleans(),
        tenant=st.text(max_size=4),
        weight=st.floats(0.001, 1000),
        user=st.text(max_size=4),
        priority=st.integers(-(2**40), 2**40),
        is_background=st.booleans(),
        timeout_s=st.none() | times,
        queue_timeout_s=st.none() | times,
        skips_prefix_cache=st.booleans(),
        digests=digests,
    ),
    st.builds(AbortRecord, counts),
    st.builds(StopRecord, counts, counts),
    st.builds(PlanRecord, times, st.none() | plans(), digests),
    st.builds(CommitRecord, times, ids, ids, digests),
    st.builds(FailRecord, times),
)


def written(items: list[Record]) -> list[bytes]:
    encoder = LogEncoder()
    return [encoder.header(OPTIONS), *(encoder.encode(record) for record in items)]


def decode_plan(step_id: int, starts: tuple[int, ...]) -> StepPlan:
    num_rows = len(starts)
    grants = BlockGrants((0,) * (num_rows + 1), ())
    return StepPlan(step_id, tuple(range(num_rows)), starts, (1,) * num_rows, (True,) * num_rows, (grants,))


@settings(max_examples=60, deadline=None)
@given(st.lists(records, max_size=12))
def test_what_is_written_is_read_back(items: list[Record]) -> None:
    log = DecisionLog(b"".join(written(items)))
    assert log.header == OPTIONS
    assert list(log.records()) == items and log.cut_at is None
    assert list(log.records()) == items, "a log can be read again"


@settings(max_examples=40, deadline=None)
@given(st.lists(records, min_size=1, max_size=6), st.data())
def test_a_cut_log_is_read_up_to_the_cut(items: list[Record], data: st.DataObject) -> None:
    parts = written(items)
    whole = b"".join(parts)
    cut = data.draw(st.integers(len(parts[0]), len(whole) - 1))
    log = DecisionLog(whole[:cut])
    ends = list(accumulate(len(part) for part in parts))
    num_whole = sum(end <= cut for end in ends) - 1
    assert list(log.records()) == items[:num_whole]
    assert log.cut_at == (None if cut in ends else ends[num_whole])


def test_a_decode_that_goes_on_costs_no_bytes() -> None:
    encoder = LogEncoder()
    encoder.encode(PlanRecord(0.0, decode_plan(7, (100,) * 128)))
    assert len(encoder.encode(PlanRecord(1.0, decode_plan(8, (101,) * 128)))) <= 24


def test_a_plan_that_does_not_go_on_is_told_in_full() -> None:
    first, second = decode_plan(1, (5, 9)), decode_plan(2, (5, 10))  # sequence 0 stayed where it was
    encoder = LogEncoder()
    data = encoder.header({}) + b"".join(encoder.encode(PlanRecord(0.0, plan)) for plan in (first, second))
    assert [record.plan for record in DecisionLog(data).records() if isinstance(record, PlanRecord)] == [first, second]


@pytest.mark.parametrize("data", [b"", b"GGUF....", MAGIC[:-3], b"x" * 500])
def test_what_is_no_log_is_refused(data: bytes) -> None:
    with pytest.raises(DecisionLogError, match="not a decision log"):
        DecisionLog(data)


def test_another_version_is_refused_with_both_numbers() -> None:
    data = bytearray(b"".join(written([])))
    data[len(MAGIC)] = VERSION + 1
    with pytest.raises(DecisionLogError, match=rf"version {VERSION + 1} .* version {VERSION}"):
        DecisionLog(bytes(data))


def test_a_log_that_ends_in_its_header_is_refused() -> None:
    whole = b"".join(written([]))
    for length in range(len(MAGIC) + 2, len(whole)):
        with pytest.raises(DecisionLogError, match="inside its header"):
            DecisionLog(whole[:length])


@pytest.mark.parametrize("place", ["kind", "body"])
def test_damage_is_told_with_its_place(place: str) -> None:
    head, first, second = written([FailRecord(1.0), CommitRecord(2.0, (3,))])
    bad = b"?" + second[1:] if place == "kind" else second[:10] + b"\x7f" + second[11:]
    log = DecisionLog(head + first + bad)
    with pytest.raises(DecisionLogError, match=f"damaged at byte {len(head + first)}"):
        list(log.records())
