"""Requests in short, and `PlanModel`: what a runner would know from plans alone, checked against what plans may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.plan import LayerSlice, SequenceEvent, StepPlan, StepResult
from ropeway.core.prefix_index import TokenHasher
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.core.sequence import Sequence

STOP_TOKEN_ID = 0


def make_request(
    request_id: str,
    num_prompt_tokens: int,
    max_tokens: int,
    *,
    stop: bool = True,
    terms: ServiceTerms | None = None,
    **params: Any,
) -> Request:
    """A request with tokens that do not matter, which ends at STOP_TOKEN_ID unless told not to."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(1, num_prompt_tokens + 1)),
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        seed=0,
        stop_token_ids=frozenset({STOP_TOKEN_ID}) if stop else frozenset(),
        terms=terms or ServiceTerms(),
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 10_000,
    num_groups: int = 1,
    has_prefix_cache: bool = False,
    **options: Any,
) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, budget, max_model_len)
    hasher = TokenHasher(block_size) if has_prefix_cache else None
    return Scheduler(limits, KVManager([num_blocks] * num_groups, block_size, hasher), **options)


def sampled_ids(plan: StepPlan) -> tuple[int, ...]:
    return tuple(compress(plan.sequence_ids, plan.is_sampled))


def result_of(plan: StepPlan, token_id: int = 1) -> StepResult:
    """Every sampled row draws the same token."""
    ids = sampled_ids(plan)
    return StepResult(plan.step_id, ids, (token_id,) * len(ids))


def run_step(scheduler: Scheduler, token_id: int = 1, now_s: float = 0.0) -> tuple[StepPlan, list[SequenceEvent]]:
    plan = scheduler.plan(now_s)
    assert plan is not None
    return plan, scheduler.commit(plan, result_of(plan, token_id), now_s)


@dataclass
class Track:
    """A sequence as its plans and events tell of it."""

    sequence: Sequence
    num_tokens: int
    num_computed: int = 0
    num_ever_computed: int = 0
    blocks: tuple[list[int], ...] = ()
    is_forgotten: bool = False
    finish_reason: str | None = None

    @property
    def holds_memory(self) -> bool:
        return any(self.blocks)


@dataclass
class PlanModel:
    """Follows a scheduler from outside and asserts, plan by plan and event by event, what must hold.

    Computed ranges have no gap and no overlap; a row samples exactly where it reaches the last known token; block
    tables have slots for what is computed; no block is granted while another sequence holds it; the budget is never
    exceeded; the slices of a row come in order, in steps that follow one another; who is preempted does not board in
    the same step, and somebody computes; one terminal event per sequence, and nothing after it. Where it is_first_come,
    nobody boards before an older sequence that waits, unless that is_kept back from the line; only as many are
    preempted as must be, the youngest, never the oldest.
    With a prefix cache sequences share blocks, start behind what was found, and let others pass; what the blocks hold
    is for FakeBackend to check.
    """

    num_blocks: int
    block_size: int
    num_groups: int
    budget: int
    max_num_seqs: int
    is_first_come: bool = True
    has_prefix_cache: bool = False
    is_kept: Callable[[Sequence], bool] = lambda sequence: False
    tracks: dict[int, Track] = field(default_factory=dict)
    by_name: dict[tuple[str, int], Track] = field(default_factory=dict)
    wave: tuple[int, int, int, LayerSlice] | None = None  # sequence, start, tokens and slice of the last plan's
    num_waves: int = 0
    num_recomputed: int = 0
    num_prompt: int = 0
    num_generated: int = 0
    num_padding: int = 0

    @property
    def unfinished(self) -> list[Track]:
        return [t for t in self.tracks.values() if t.finish_reason is None]

    def add(self, sequences: tuple[Sequence, ...]) -> None:
        for index, sequence in enumerate(sequences):
            assert sequence.index == index and sequence.sequence_id not in self.tracks
            assert not self.tracks or sequence.sequence_id > max(self.tracks)
            track = Track(sequence, len(sequence.request.prompt_token_ids))
            self.tracks[sequence.sequence_id] = track
            self.by_name[sequence.request.request_id, index] = track

    def apply(self, plan: StepPlan) -> None:
        """Take in a plan as a runner would."""
        assert 0 < plan.total_num_tokens <= self.budget and plan.num_rows <= self.max_num_seqs
        assert len(set(plan.sequence_ids)) == plan.num_rows, "a sequence has two rows"
        assert len(plan.starts) == len(plan.num_tokens) == len(plan.is_sampled) == plan.num_rows
        assert len(plan.grants) == self.num_groups
        for sequence_id in plan.finished_ids:
            track = self.tracks[sequence_id]
            assert track.finish_reason is not None
            self._clear(track)
            track.is_forgotten = True
        self._check_preempted(plan)
        for sequence_id in plan.preempted_ids:
            self._clear(self.tracks[sequence_id])
        self._check_nobody_overtakes(plan)
        self._grant(plan)
        for row in range(plan.num_rows):
            self._compute(self.tracks[plan.sequence_ids[row]], plan, row)
        self._follow_wave(plan)

    def _follow_wave(self, plan: StepPlan) -> None:
        last, self.wave = self.wave, None
        if plan.layer_slice is None:
            return
        self.wave = (plan.sequence_ids[-1], plan.starts[-1], plan.num_tokens[-1], plan.layer_slice)
        index, count = plan.layer_slice
        assert 0 <= index < count and count > 1
        if index:
            assert last == (*self.wave[:3], LayerSlice(index - 1, count)), "a slice without the one before it"
        self.num_waves += plan.layer_slice.is_last

    def take(self, events: list[SequenceEvent]) -> None:
        """Take in events of `commit`, `abort`, `stop` or `fail`."""
        for event in events:
            track = self.by_name[event.request_id, event.index]
            assert track.finish_reason is None, "an event after the terminal one"
            assert event.token_ids or event.finish_reason, "an event without news"
            track.num_tokens += len(event.token_ids)
            track.finish_reason = event.finish_reason
            self.num_generated += len(event.token_ids)
            num_generated = track.num_tokens - track.sequence.num_prompt_tokens
            assert num_generated <= track.sequence.request.max_tokens
            if event.finish_reason == "length":
                assert num_generated == track.sequence.request.max_tokens

    def check_counters(self, scheduler: Scheduler) -> None:
        stats = scheduler.stats()
        assert stats.num_free_blocks + stats.num_used_blocks == stats.num_blocks
        assert stats.num_running + stats.num_waiting + stats.num_preempted == len(self.unfinished)
        assert stats.num_recomputed_tokens == self.num_recomputed
        assert stats.num_prompt_tokens == self.num_prompt
        assert stats.num_generation_tokens == self.num_generated
        assert stats.num_padding_tokens == self.num_padding
        reasons = [t.finish_reason for t in self.tracks.values() if t.finish_reason]
        assert {reason: n for reason, n in stats.num_finished.items() if n} == {r: reasons.count(r) for r in reasons}

    def _clear(self, track: Track) -> None:
        track.num_computed = 0
        track.blocks = ()

    def _check_preempted(self, plan: StepPlan) -> None:
        victims = [i for i in plan.preempted_ids if self.tracks[i].holds_memory]  # others: announced again
        if not victims:
            return
        running = {i: t for i, t in self.tracks.items() if t.holds_memory and t.finish_reason is None}
        assert not set(victims) & set(plan.sequence_ids), "preempted and boarded in one step"
        if not self.is_first_come:
            return
        assert victims == sorted(running)[-len(victims) :][::-1], "not the last admitted, or not in order"
        assert len(victims) < len(running), "the oldest was preempted"
        spared = {i: t for i, t in running.items() if i not in victims[:-1]}
        holders = [t for t in self.tracks.values() if t.holds_memory and t not in running.values()]
        num_held = len({block_id for t in [*holders, *spared.values()] for block_id in t.blocks[0]})
        num_needed = sum(t.num_tokens > len(t.blocks[0]) * self.block_size for t in spared.values())
        assert num_held + num_needed > self.num_blocks, "one more was preempted than had to be"

    def _check_nobody_overtakes(self, plan: StepPlan) -> None:
        rows = set(plan.sequence_ids)
        boarding = [i for i in plan.sequence_ids if not self.tracks[i].holds_memory]
        for track in self.unfinished if boarding and self.is_first_come and not self.has_prefix_cache else ():
            sequence_id = track.sequence.sequence_id
            if sequence_id < max(boarding) and not self.is_kept(track.sequence):
                assert sequence_id in rows or track.holds_memory, "a younger sequence boarded first"

    def _grant(self, plan: StepPlan) -> None:
        for group, grants in enumerate(plan.grants):
            held = [b for t in self.tracks.values() if t.blocks for b in t.blocks[group]]
            assert len(grants.indptr) == plan.num_rows + 1 and grants.indptr[-1] == len(grants.block_ids)
            if self.has_prefix_cache:
                continue
            assert len(set(grants.block_ids)) == len(grants.block_ids), "a block is granted twice"
            assert not set(held) & set(grants.block_ids), "a block is granted while it is held"
        for row, sequence_id in enumerate(plan.sequence_ids):
            track = self.tracks[sequence_id]
            track.blocks = track.blocks or tuple([] for _ in plan.grants)
            for table, grants in zip(track.blocks, plan.grants, strict=True):
                table.extend(grants.block_ids[grants.indptr[row] : grants.indptr[row + 1]])

    def _compute(self, track: Track, plan: StepPlan, row: int) -> None:
        start, num_tokens, is_sampled = plan.starts[row], plan.num_tokens[row], plan.is_sampled[row]
        assert not track.is_forgotten and num_tokens > 0
        if track.finish_reason is not None:  # padding
            assert (num_tokens, is_sampled) == (1, True) and 0 <= start == track.num_computed - 1
            self.num_padding += 1
            return
        end = start + num_tokens
        if self.has_prefix_cache and not track.num_computed:
            track.num_computed = start  # found
        assert start == track.num_computed, "a gap or an overlap in what is computed"
        is_partial = plan.layer_slice is not None and row == plan.num_rows - 1 and not plan.layer_slice.is_last
        assert end <= track.num_tokens and is_sampled == (end == track.num_tokens and not is_partial)
        assert all(end <= len(table) * self.block_size for table in track.blocks), "computed without a slot"
        if is_partial:
            return
        self.num_recomputed += max(0, min(end, track.num_ever_computed) - start)
        self.num_prompt += max(0, min(end, track.sequence.num_prompt_tokens) - max(start, track.num_ever_computed))
        track.num_computed = end
        track.num_ever_computed = max(end, track.num_ever_computed)
