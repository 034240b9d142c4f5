"""In what order everybody runs, and about how long that takes. Plans only; runs nothing.

A round is one seed of one row: Ropeway and every peer of the row, one after the other, in turning order. Ropeway's run
of a round is paired with each peer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.results import markdown_table
from harness.rows import Row

# About what everybody does on the class of machine the targets are for: prompt and output tokens/s, alone and
# together. Only the time plan is made of these.
_RATES: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "ropeway": ((1100.0, 110.0), (1100.0, 420.0)),
    "llama-q4_0": ((430.0, 90.0), (450.0, 115.0)),
    "llama-q4_1": ((190.0, 65.0), (190.0, 75.0)),
    "openvino-int4": ((500.0, 43.0), (500.0, 145.0)),
    "openvino-int8": ((500.0, 40.0), (500.0, 140.0)),
}
_START_S = {"default": 6.0, "llama-1b": 20.0}  # start, warm-up, end
_MODEL_RATIO = {"default": 1.0, "llama-1b": 9.0}  # work per token beside the default model's


@dataclass(frozen=True, slots=True)
class Round:
    """One seed of one row. peers: those that take part, in the row's order."""

    row: Row
    seed: int
    peers: tuple[str, ...]

    @property
    def order(self) -> tuple[str, ...]:
        """Ropeway first at even seeds, last at odd ones."""
        return ("ropeway", *self.peers) if self.seed % 2 == 0 else (*reversed(self.peers), "ropeway")


def planned_rounds(rows: Sequence[Row], peers: Sequence[str] | None, seeds: Sequence[int]) -> list[Round]:
    """Seeds outermost, so that a run cut short has something of everything. peers: only these, where rows have them."""
    return [
        Round(row, seed, taking_part)
        for seed in seeds
        for row in rows
        if (taking_part := tuple(peer for peer in row.peers if peers is None or peer in peers))
    ]


def without_the_beaten(rounds: Sequence[Round], outputs_per_s: dict[tuple[str, str], float]) -> list[Round]:
    """`rounds` without peers that were behind the best one of their row, where the row asks for the best only.

    outputs_per_s: (row, peer) -> output tokens/s at the first seed, of those measured.
    """
    kept = []
    for each in rounds:
        known = {peer: rate for (row, peer), rate in outputs_per_s.items() if row == each.row.name}
        if each.row.only_best_peer and set(each.row.peers) & set(each.peers) <= known.keys():
            best = max(each.peers, key=lambda peer: known[peer])
            each = Round(each.row, each.seed, (best,))
        kept.append(each)
    return kept


def expected_s(row: Row, contestant: str) -> float:
    """About how long one run takes, seconds."""
    prompt_per_s, output_per_s = _RATES[contestant][row.concurrency >= 8]
    work_s = row.num_prompt_tokens / prompt_per_s + row.num_output_tokens / output_per_s
    return _START_S[row.model] + work_s * _MODEL_RATIO[row.model]


def round_s(each: Round) -> float:
    return sum(expected_s(each.row, contestant) for contestant in each.order)


def plan_s(rounds: Sequence[Round]) -> float:
    """About how long all rounds take, seconds; of rows against the best peer, the longest-running peer stays."""
    total_s = 0.0
    first_seed = rounds[0].seed if rounds else 0
    for each in rounds:
        if each.row.only_best_peer and each.seed != first_seed:
            each = Round(each.row, each.seed, (max(each.peers, key=lambda peer: expected_s(each.row, peer)),))
        total_s += round_s(each)
    return total_s


def format_plan(rounds: Sequence[Round]) -> str:
    """A line per row: what is sent and about how long it takes, and the sum."""
    lines = []
    for row in dict.fromkeys(each.row for each in rounds):
        members = [each for each in rounds if each.row == row]
        each_s = ", ".join(f"{name} {expected_s(row, name):.0f} s" for name in members[0].order)
        num_tokens = f"{row.num_prompt_tokens} + {row.num_output_tokens}"
        lines.append(
            [row.name, str(row.num_requests), num_tokens, str(len(members)), each_s, f"{plan_s(members) / 60:.0f}"]
        )
    table = markdown_table(("row", "requests", "tokens in + out", "rounds", "about, per round", "minutes"), lines)
    return f"{table}\nall together about {plan_s(rounds) / 60:.0f} minutes"
