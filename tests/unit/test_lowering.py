"""Which rows the phases of a lowered Program run on."""

from __future__ import annotations

from dataclasses import replace

from ropeway.backends.layer_cuts import layer_cuts
from ropeway.backends.lowering import AttentionPhase, Phase, ProductPhase, Quantize, RowsPhase, lower, select_early
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


def two_layers(*, reads_twice: bool = False) -> tuple[Phase, ...]:
    """reads_twice: the second layer reads what the first had quantised for itself."""
    layers = [
        (
            Linear("q", "x" if layer else "y", weight(f"q{layer}")),
            KvWrite("q", "q", layer, 0),
            Attention("a", "q", layer, 0, 1, 1, 8, 1.0),
            Linear("h", "a", weight(f"o{layer}")),
            Add("x", "x", "h"),
            Norm("y", "x", Weight("norm", (8,), ("embed",)), 1e-5),
            Linear("wide", "y", weight(f"up{layer}", 16)),
            Linear("h", "wide", weight(f"down{layer}", 8, 16)),
            Add("x", "x", "y" if reads_twice else "h"),
        )
        for layer in range(2)
    ]
    embed = (Embed("x", weight("embedding", 20)), Embed("y", weight("embedding", 20)))
    program = replace(
        PROGRAM,
        ops=(*embed, *layers[0], *layers[1], SelectRows("last", "x"), Logits("last", weight("embedding", 20))),
    )
    return lower(program, {"up0", "up1", "q1"})


WIDTHS = {**dict.fromkeys(("x", "q", "a", "h", "y", "last", "logits"), 8), "wide": 16}


def test_layers_are_parted_where_least_is_kept() -> None:
    """Not where an int8 view is still to be read: after a product whose inputs are of no further use."""
    phases = two_layers()
    (cut,) = layer_cuts(phases, WIDTHS)
    assert set(cut.buffers) == {"x", "h"}
    before = phases[cut.phase - 1]
    assert isinstance(before, ProductPhase) and before.label == "down0"


def test_no_cut_parts_a_view_from_its_reader() -> None:
    for phases in (two_layers(), two_layers(reads_twice=True)):
        for cut in layer_cuts(phases, WIDTHS):
            needed: set[str] = set()
            for phase in reversed(phases[cut.phase :]):
                if isinstance(phase, ProductPhase) and any(w.name in ("up0", "up1", "q1") for w, _ in phase.products):
                    needed.add(phase.x)
                elif isinstance(phase, RowsPhase):
                    needed -= {op.x for op in phase.ops if isinstance(op, Quantize)}
            assert not needed, f"{cut} leaves the views of {needed} behind"


def test_one_layer_has_no_cut() -> None:
    assert layer_cuts(lower(select_early(PROGRAM), frozenset()), WIDTHS) == ()
