"""`ropeway replay`: rebuilds the schedule of a decision log, prints it, and draws it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from ropeway.core.decision_log import DecisionLog, PlanRecord
from ropeway.sim.replay import Replay, ReplayDifference
from ropeway.sim.timeline import STEP_HEADER, Timeline, step_line


def add_parser(subparsers: Any) -> None:
    """Adds `replay`."""
    parser = subparsers.add_parser(
        "replay",
        help="rebuild the schedule of a decision log, as a table or a timeline",
        description="Rebuilds the schedule that `ropeway serve --decision-log FILE` recorded, step by step with a real "
        "scheduler, and prints it. Exit code 1, with the place, where it does not come out the same byte for byte.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_replay)
    add = parser.add_argument
    add("log", type=Path, metavar="FILE", help="the decision log")
    add("--steps", metavar="FROM:TO", type=_steps, default=(0, None), help="show these steps only, such as 100:200; "
        "all are replayed; default: all")  # fmt: skip
    add("--plot", type=Path, metavar="FILE.svg", help="draw the steps shown as a timeline, one lane per sequence")
    add("--quiet", action="store_true", help="no table, only the last line")


def run_replay(args: argparse.Namespace) -> int:
    """Replays a log; 0 where the schedule is the same, 1 where it differs."""
    log = DecisionLog(args.log.read_bytes())
    replay, timeline = Replay(log), Timeline()
    shown = _Shown(*args.steps)
    if not args.quiet:
        print(STEP_HEADER)
    try:
        for replayed in replay.run():
            record = replayed.record
            timeline.take(record)
            if isinstance(record, PlanRecord) and shown.take(record) and not args.quiet:
                assert replayed.stats is not None
                print(step_line(record, replayed.stats.num_used_blocks))
    except ReplayDifference as difference:
        print(f"ropeway: the replay differs from {args.log}: {difference}", file=sys.stderr)
        return 1
    if replay.cut_at is not None:
        print(f"ropeway: warning: {args.log} is cut off at byte {replay.cut_at}; replayed up to there", file=sys.stderr)
    if args.plot is not None:
        args.plot.write_text(timeline.svg(args.log.name, shown.start_s, shown.end_s))
    stats = replay.stats()
    print(
        f"{stats.num_steps} steps rebuilt, identical: {stats.num_prompt_tokens} prompt tokens, "
        f"{stats.num_generation_tokens} generated, {stats.num_preemptions} preemptions, "
        f"{stats.num_recomputed_tokens} tokens recomputed, {sum(stats.num_finished.values())} sequences ended"
    )
    return 0


class _Shown:
    """The steps to be shown, and when they were: start_s, end_s are None where they reach to the ends of the log."""

    def __init__(self, first: int, last: int | None) -> None:
        self._first = first
        self._last = last
        self._step_id = 0
        self.start_s: float | None = None
        self.end_s: float | None = None

    def take(self, record: PlanRecord) -> bool:
        """Whether this plan is shown. One that holds nothing goes with the step before it."""
        if record.plan is not None:
            self._step_id = record.plan.step_id
        if self._last is not None and self._step_id >= self._last:
            self.end_s = record.now_s if self.end_s is None else self.end_s
            return False
        if self._step_id < self._first:
            return False
        if self.start_s is None and self._first:
            self.start_s = record.now_s
        return True


def _steps(text: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"(\d*):(\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not FROM:TO, such as 100:200, 100: or :200")
    return int(match[1] or 0), int(match[2]) if match[2] else None
