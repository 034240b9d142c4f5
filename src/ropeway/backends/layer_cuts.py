"""Where phases can be parted between layers: what a row that stops there must keep to go on later. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ropeway.backends.lowering import AttentionPhase, Phase, ProductPhase, Quantize, RowOp, RowsPhase, reads, written_by


@dataclass(frozen=True, slots=True)
class Cut:
    """Before phase number `phase`. buffers: that are read from there on before they are written."""

    phase: int
    buffers: tuple[str, ...]


def layer_cuts(phases: Sequence[Phase], widths: dict[str, int]) -> tuple[Cut, ...]:
    """At most one cut between each two attentions that follow one another: the one with the least to keep.

    widths: of buffers. No cut parts the int8 view of a buffer from who reads it.
    """
    live = _live_before(phases)
    views = _views_before(phases)
    attentions = [i for i, phase in enumerate(phases) if isinstance(phase, AttentionPhase)]
    cuts = []
    for first, second in zip(attentions, attentions[1:], strict=False):
        places = [i for i in range(first + 1, second + 1) if not live[i] & views[i]]
        if places:
            place = min(places, key=lambda i: (sum(widths[name] for name in live[i]), -i))
            cuts.append(Cut(place, tuple(sorted(live[place]))))
    return tuple(cuts)


def _live_before(phases: Sequence[Phase]) -> list[set[str]]:
    """Of each phase, the buffers with values that it or a later one reads."""
    live: set[str] = set()
    found = []
    for phase in reversed(phases):
        if isinstance(phase, ProductPhase):
            live = (live - {out for _, out in phase.products}) | {phase.x}
        else:
            for op in reversed(_ops(phase)):
                live = (live - {written_by(op)}) | reads(op)
        found.append(live)
    return found[::-1]


def _views_before(phases: Sequence[Phase]) -> list[set[str]]:
    """Of each phase, the buffers whose int8 view is of their present values."""
    views: set[str] = set()
    found = []
    for phase in phases:
        found.append(set(views))
        if isinstance(phase, ProductPhase):
            views -= {out for _, out in phase.products}
        for op in _ops(phase):
            views.discard(written_by(op))
            if isinstance(op, Quantize):
                views.add(op.x)
    return found


def _ops(phase: Phase) -> tuple[RowOp, ...]:
    match phase:
        case RowsPhase():
            return phase.ops
        case AttentionPhase():
            return (phase.op,)
        case ProductPhase():
            return ()
