"""What a schedule looked like: a table of its steps, a timeline of its sequences. Knows records, no scheduler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

from ropeway.core.decision_log import AbortRecord, AddRecord, CommitRecord, FailRecord, PlanRecord, Record, StopRecord
from ropeway.core.plan import StepPlan

Phase = Literal["waiting", "prefill", "decode", "preempted"]

_COLOURS: dict[Phase, str] = {"waiting": "#d9d9d9", "prefill": "#d9730d", "decode": "#0b6e99", "preempted": "#b3261e"}
_MEANING: dict[Phase, str] = {
    "waiting": "waiting",
    "prefill": "prefill: prompt, or tokens lost by preemption",
    "decode": "decode",
    "preempted": "preempted",
}
_LEFT, _RIGHT, _TOP, _BOTTOM, _PLOT_WIDTH = 96, 24, 74, 44, 1040
_MAX_LANES = 600

STEP_HEADER = f"{'step':>7} {'time, s':>10} {'batch':>5} {'tokens':>6} {'blocks':>6}  chunks, preempted (-), ended (.)"


def step_line(record: PlanRecord, num_used_blocks: int) -> str:
    """One line of the table. num_used_blocks: held once the plan was made.

    batch: rows; chunks: of rows that compute more than one token, as SEQUENCE:START+TOKENS, with (SLICE/SLICES) where
    it passes a slice of the layers.
    """
    plan = record.plan
    if plan is None:
        return f"{'':>7} {record.now_s:>10.3f}   nothing to compute"
    chunks = [
        f"{sequence_id}:{start}+{n}"
        for sequence_id, start, n, is_sampled in zip(
            plan.sequence_ids, plan.starts, plan.num_tokens, plan.is_sampled, strict=True
        )
        if n > 1 or not is_sampled
    ]
    if plan.layer_slice is not None and chunks:
        chunks[-1] += f"({plan.layer_slice.index + 1}/{plan.layer_slice.count})"
    notes = [*chunks, *(f"-{i}" for i in plan.preempted_ids), *(f".{i}" for i in plan.finished_ids)]
    return (
        f"{plan.step_id:>7} {record.now_s:>10.3f} {plan.num_rows:>5} {plan.total_num_tokens:>6} {num_used_blocks:>6}  "
        + " ".join(notes)
    ).rstrip()


@dataclass(slots=True)
class Lane:
    """The life of one sequence: spans of (phase, from, to) in seconds; end_s is None where the log ends before it."""

    sequence_id: int
    num_prompt_tokens: int
    spans: list[tuple[Phase, float, float]] = field(default_factory=list)
    phase: Phase = "waiting"
    since_s: float = 0.0
    end_s: float | None = None

    def is_within(self, start_s: float, end_s: float) -> bool:
        """Whether any of its life lies between two times."""
        first_s = self.spans[0][1] if self.spans else self.since_s
        return first_s <= end_s and (self.end_s is None or self.end_s >= start_s)

    def enter(self, phase: Phase, now_s: float) -> None:
        if phase != self.phase:
            self.leave(now_s)
            self.phase, self.since_s = phase, now_s

    def leave(self, now_s: float) -> None:
        if now_s > self.since_s:
            self.spans.append((self.phase, self.since_s, now_s))


class Timeline:
    """Follows records and keeps a lane for each sequence."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self._requests: list[range] = []
        self._first_s: float | None = None
        self._now_s = 0.0
        self._plan: StepPlan | None = None
        self._next_id = 0

    def follow(self, records: Iterable[Record]) -> None:
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """Takes in one record, in the order of the log."""
        if not isinstance(record, AbortRecord | StopRecord):
            self._now_s = record.now_s
            self._first_s = record.now_s if self._first_s is None else self._first_s
        match record:
            case AddRecord():
                ids = range(self._next_id, self._next_id + record.num_sequences)
                self._next_id = ids.stop
                self._requests.append(ids)
                for sequence_id in ids:
                    self.lanes[sequence_id] = Lane(sequence_id, record.num_prompt_tokens, since_s=record.now_s)
            case PlanRecord():
                self._take_plan(record)
            case CommitRecord():
                self._end((*record.stopped_ids, *record.failed_ids))
            case FailRecord():
                self._end(self._plan.sequence_ids if self._plan else ())
            case AbortRecord():
                self._end(self._requests[record.request_number])
            case StopRecord():
                self._end([self._requests[record.request_number][record.index]])

    def _take_plan(self, record: PlanRecord) -> None:
        plan = self._plan = record.plan
        if plan is None:
            return
        self._end(plan.finished_ids)
        for sequence_id in plan.preempted_ids:
            self.lanes[sequence_id].enter("preempted", record.now_s)
        for sequence_id, start, num_tokens, is_sampled in zip(
            plan.sequence_ids, plan.starts, plan.num_tokens, plan.is_sampled, strict=True
        ):
            lane = self.lanes[sequence_id]
            is_decode = num_tokens == 1 and is_sampled and start >= lane.num_prompt_tokens
            if lane.end_s is None:
                lane.enter("decode" if is_decode else "prefill", record.now_s)

    def _end(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            lane = self.lanes[sequence_id]
            if lane.end_s is None:
                lane.leave(self._now_s)
                lane.end_s = self._now_s

    def svg(self, title: str, start_s: float | None = None, end_s: float | None = None) -> str:
        """A self-contained SVG: time to the right, a lane per sequence in order of arrival.

        start_s, end_s: what is shown, on the clock of the records; None is their first and last.
        """
        start_s = (self._first_s or 0.0) if start_s is None else start_s
        window = _Window(start_s, max(self._now_s if end_s is None else end_s, start_s + 1e-9))
        shown = [lane for lane in self.lanes.values() if lane.is_within(window.start_s, window.end_s)]
        lanes = shown[:_MAX_LANES]
        lane_height = 14 if len(lanes) <= 40 else 7 if len(lanes) <= 150 else 4
        plot_height = max(1, len(lanes)) * lane_height
        width, height = _LEFT + _PLOT_WIDTH + _RIGHT, _TOP + plot_height + _BOTTOM
        note = "" if len(lanes) == len(shown) else f": the first {len(lanes)} of {len(shown)} sequences"
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="system-ui, sans-serif" font-size="11" fill="#222">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="{_LEFT}" y="24" font-size="15" font-weight="600">{escape(title + note)}</text>',
            *_legend(),
            *_time_axis(window, start_s - (self._first_s or 0.0), plot_height),
        ]
        for number, lane in enumerate(lanes):
            parts += self._lane(lane, _TOP + number * lane_height, lane_height, window)
        parts.append("</svg>\n")
        return "\n".join(parts)

    def _lane(self, lane: Lane, y: float, height: int, window: _Window) -> list[str]:
        spans = list(lane.spans)
        if lane.end_s is None and self._now_s > lane.since_s:
            spans.append((lane.phase, lane.since_s, self._now_s))
        parts = []
        if height >= 7:
            parts.append(
                f'<text x="{_LEFT - 6}" y="{y + height - 2}" text-anchor="end" font-size="{height - 2}">'
                f"{lane.sequence_id}</text>"
            )
        first_s = self._first_s or 0.0
        for phase, start_s, end_s in spans:
            if end_s < window.start_s or start_s > window.end_s:
                continue
            x, right = window.x(start_s), window.x(end_s)
            hover = f"sequence {lane.sequence_id}: {phase}, {start_s - first_s:.3f} to {end_s - first_s:.3f} s"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(right - x, 0.4):.1f}" height="{height - 1}" '
                f'fill="{_COLOURS[phase]}"><title>{escape(hover)}</title></rect>'
            )
        return parts


@dataclass(frozen=True, slots=True)
class _Window:
    """The stretch of time that is drawn."""

    start_s: float
    end_s: float

    def x(self, time_s: float) -> float:
        share = (time_s - self.start_s) / (self.end_s - self.start_s)
        return _LEFT + _PLOT_WIDTH * min(1.0, max(0.0, share))


def _legend() -> list[str]:
    parts, x = [], float(_LEFT)
    for phase, colour in _COLOURS.items():
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="48">{_MEANING[phase]}</text>')
        x += 34 + 6.1 * len(_MEANING[phase])
    return parts


def _time_axis(window: _Window, offset_s: float, plot_height: int) -> Sequence[str]:
    """Ticks at round times since the first record; the window begins offset_s after it."""
    bottom, length_s = _TOP + plot_height, window.end_s - window.start_s
    step_s = round_step(length_s / 8)
    parts = []
    for index in range(math.ceil(offset_s / step_s - 1e-9), math.floor((offset_s + length_s) / step_s + 1e-9) + 1):
        x = window.x(window.start_s + index * step_s - offset_s)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#ececec"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{index * step_s:,g}</text>')
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{_LEFT + _PLOT_WIDTH}" fill="none" stroke="#222"/>')
    parts.append(
        f'<text x="{_LEFT + _PLOT_WIDTH / 2}" y="{bottom + 34}" text-anchor="middle">'
        "time since the first record, seconds</text>"
    )
    parts.append(
        f'<text transform="translate(20 {_TOP + plot_height / 2}) rotate(-90)" text-anchor="middle">sequences</text>'
    )
    return parts


def round_step(least: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is at least `least`."""
    magnitude = 1e-9
    while magnitude * 10 <= least:
        magnitude *= 10
    return next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= least * (1 - 1e-9))
