"""Which rows the phases of a lowered Program run on."""

from __future__ import annotations

from dataclasses import replace

from ropeway.backends.lowering import AttentionPhase, ProductPhase, RowsPhase, lower, select_early
from ropeway.model.program import (
    Add,
    Attention,
    CacheGroup,
    Embed,
    KvWrite,
    Linear,
    Logits,
    Norm,
    Program,
    SelectRows,
    Weight,
)


def weight(name: str, outputs: int = 8, inputs: int = 8) -> Weight:
    return Weight(name, (outputs, inputs), ("embed", "embed"))


PROGRAM = Program(
    ops=(
        Embed("x", weight("embedding", 20)),
        Linear("q", "x", weight("q")),
        KvWrite("q", "q", 0, 0),
        Attention("a", "q", 0, 0, 1, 1, 8, 1.0),
        Linear("h", "a", weight("o")),
        Add("x", "x", "h"),
        SelectRows("last", "x"),
        Norm("last", "last", Weight("norm", (8,), ("embed",)), 1e-5),
        Logits("last", weight("embedding", 20)),
    ),
    buffers=dict.fromkeys(("x", "q", "a", "h", "last"), 8),
    cache_groups=(CacheGroup((0,), 1, 8),),
    vocab_size=20,
    context_length=64,
)


def test_rows_are_selected_right_after_attention() -> None:
    program = select_early(PROGRAM)
    after = program.ops[program.ops.index(PROGRAM.ops[3]) + 1 :]
    assert after[:2] == (SelectRows("a.selected", "a"), SelectRows("x.selected", "x"))
    assert after[2:4] == (Linear("h", "a.selected", weight("o")), Add("x.selected", "x.selected", "h"))
    assert after[-1] == Logits("x.selected", weight("embedding", 20))
    assert program.buffers["a.selected"] == program.buffers["x.selected"] == 8
    phases = lower(program, frozenset())
    attention = next(i for i, phase in enumerate(phases) if isinstance(phase, AttentionPhase))
    assert all(isinstance(phase, ProductPhase | RowsPhase) and phase.is_selected for phase in phases[attention + 1 :])


def test_a_buffer_of_before_that_is_read_after_the_selection_stays() -> None:
    """Then rows are selected where the Program says."""
    ops = (*PROGRAM.ops[:-2], Add("last", "last", "h"), PROGRAM.ops[-1])
    program = replace(PROGRAM, ops=ops)
    assert select_early(program) is program


def test_nothing_between_attention_and_the_selection() -> None:
    ops = (*PROGRAM.ops[:4], SelectRows("last", "a"), *PROGRAM.ops[7:])
    program = replace(PROGRAM, ops=ops)
    assert select_early(program) is program
