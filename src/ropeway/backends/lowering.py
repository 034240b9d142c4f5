"""From a Program to phases: which ops run together, between which all threads wait. Pure data in, pure data out.

* Ops on rows (norm, rope, add, ...) that follow one another form one phase: a thread takes some rows through all.
* Linears that read the same buffer form one product phase: q, k and v; gate and up.
* A buffer is quantised once after it was written, in the phase that wrote it where that is a rows phase, however many
  linears read it.
* The bias of a linear is added at the start of the next rows phase.
* Rows whose logits nobody wants leave right after the last attention.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ropeway.model.program import Add, Attention, GatedAct, Linear, Logits, Norm, Op, Program, Rope, SelectRows, Weight

_NOT_READ = frozenset({"out", "act", "pairing"})  # of the fields of ops that are strings
LOGITS = "logits"  # the buffer of the result; not a name of the Program's


@dataclass(frozen=True, slots=True)
class RopeTable:
    """What decides the angles of a rope; ropes that agree share their sines and cosines."""

    rotary_dim: int
    base: float
    freq_factors: Weight | None
    position_divisor: float


@dataclass(frozen=True, slots=True)
class Turns:
    """Computes the sines and cosines of a table at each row's position."""

    table: RopeTable


@dataclass(frozen=True, slots=True)
class Bias:
    """x += weight, per row."""

    x: str
    weight: Weight


@dataclass(frozen=True, slots=True)
class Quantize:
    """Makes the int8 view of x that quantised weights are multiplied with."""

    x: str


RowOp = Op | Turns | Bias | Quantize


@dataclass(frozen=True, slots=True)
class RowsPhase:
    """ops, in order, on any rows. is_selected: on the selected rows."""

    label: str
    is_selected: bool
    ops: tuple[RowOp, ...]


@dataclass(frozen=True, slots=True)
class ProductPhase:
    """out = x @ weight^T for each (weight, out)."""

    label: str
    is_selected: bool
    x: str
    products: tuple[tuple[Weight, str], ...]


@dataclass(frozen=True, slots=True)
class AttentionPhase:
    label: str
    op: Attention


Phase = RowsPhase | ProductPhase | AttentionPhase


def lower(program: Program, quantised_weights: AbstractSet[str]) -> tuple[Phase, ...]:
    """The phases of a Program. quantised_weights: names of the weights that are multiplied with int8 activations."""
    lowering = _Lowering(quantised_weights)
    for table in dict.fromkeys(rope_table(op) for op in program.ops if isinstance(op, Rope)):
        lowering.add_row_op(Turns(table))
    for op in program.ops:
        match op:
            case Linear():
                lowering.add_linear(op.x, op.weight, op.out, op.bias)
            case Logits():
                lowering.add_linear(op.x, op.weight, LOGITS, None)
            case Attention():
                lowering.add_attention(op)
            case SelectRows():
                lowering.select_rows(op)
            case _:
                lowering.add_row_op(op)
    return lowering.finish()


def select_early(program: Program) -> Program:
    """The same results with the rows selected before the last ops that work on each row alone.

    No later token reads what those compute for the others: in a transformer, all of the last layer after attention.
    """
    ends = [i for i, op in enumerate(program.ops) if isinstance(op, SelectRows)]
    if len(ends) != 1:
        return program
    end, start = ends[0], ends[0]
    while start > 0 and isinstance(program.ops[start - 1], Linear | Norm | GatedAct | Add):
        start -= 1
    select = program.ops[end]
    assert isinstance(select, SelectRows)
    tail = program.ops[start:end]
    if not tail:
        return program
    written: set[str] = set()
    brought: dict[str, str] = {}  # buffers with rows of before -> what holds the selected ones
    for op in (*tail, select):
        brought |= {name: f"{name}.selected" for name in reads(op) - written}
        written.add(written_by(op))
    rest = program.ops[end + 1 :]
    last = brought.get(select.x, select.x)
    stale = (brought.keys() | written) - {select.out}  # what ops after may not read before they write it
    for op in rest:
        if reads(op) & stale or written_by(op) == last:
            return program
        stale.discard(written_by(op))
    selects = [SelectRows(out, name) for name, out in sorted(brought.items())]
    renamed = [_renamed(op, brought) for op in tail]
    ops = (*program.ops[:start], *selects, *renamed, *(_renamed(op, {select.out: last}) for op in rest))
    widths = {out: program.buffers[name] for name, out in brought.items()}
    return replace(program, ops=ops, buffers={**program.buffers, **widths})


def reads(op: RowOp) -> set[str]:
    """The buffers whose values `op` needs."""
    return {value for f in fields(op) if f.name not in _NOT_READ and isinstance(value := getattr(op, f.name), str)}


def written_by(op: RowOp) -> str:
    """The buffer that `op` changes; empty for one that changes none."""
    return op.x if isinstance(op, Rope | Bias) else getattr(op, "out", "")


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    found: dict[str, Any] = {
        f.name: names[value] for f in fields(op) if isinstance(value := getattr(op, f.name), str) and value in names
    }
    return replace(op, **found)


def rope_table(op: Rope) -> RopeTable:
    """The table that `op` turns by."""
    return RopeTable(op.rotary_dim, op.base, op.freq_factors, op.position_divisor)


@dataclass
class _Lowering:
    quantised_weights: AbstractSet[str]
    phases: list[Phase] = field(default_factory=list)
    is_selected: bool = False
    row_ops: list[RowOp] = field(default_factory=list)  # of the open rows phase
    biases: list[RowOp] = field(default_factory=list)  # of the last product phase, still to be added
    quantised: set[str] = field(default_factory=set)  # buffers whose int8 view is of their present values

    def add_row_op(self, op: RowOp) -> None:
        self.row_ops += [*self.biases, op]
        self.biases.clear()
        self._written(getattr(op, "out", None) or getattr(op, "x", None))

    def select_rows(self, op: SelectRows) -> None:
        if not self.is_selected:
            self._close_rows()
            self.is_selected = True
            self.quantised.clear()  # views of the rows before
        self.add_row_op(op)

    def add_linear(self, x: str, weight: Weight, out: str, bias: Weight | None) -> None:
        if weight.name in self.quantised_weights and x not in self.quantised:
            self.add_row_op(Quantize(x))
            self.quantised.add(x)
        last = self.phases[-1] if self.phases and not self.row_ops else None
        if isinstance(last, ProductPhase) and last.x == x and out not in _outputs(last):
            self.phases.pop()
            products = (*last.products, (weight, out))
        else:
            self._close_rows()
            products = ((weight, out),)
        label = "+".join(_short_name(weight) for weight, _ in products)
        self.phases.append(ProductPhase(label, self.is_selected, x, products))
        if bias is not None:
            self.biases.append(Bias(out, bias))
        self._written(out)

    def add_attention(self, op: Attention) -> None:
        self._close_rows()
        self.phases.append(AttentionPhase("attention", op))
        self._written(op.out)

    def finish(self) -> tuple[Phase, ...]:
        self._close_rows()
        return tuple(self.phases)

    def _close_rows(self) -> None:
        ops = [*self.row_ops, *self.biases]
        self.row_ops.clear()
        self.biases.clear()
        if ops:
            names = dict.fromkeys(_snake_case(type(op).__name__) for op in ops)
            self.phases.append(RowsPhase("+".join(names), self.is_selected, tuple(ops)))

    def _written(self, buffer: str | None) -> None:
        self.quantised.discard(buffer or "")


def _outputs(phase: ProductPhase) -> set[str]:
    return {out for _, out in phase.products}


def _short_name(weight: Weight) -> str:
    """blk.12.attn_q.weight -> attn_q"""
    return re.sub(r"^blk\.\d+\.|\.weight$", "", weight.name)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
