"""Steps paced by time, on a scheduler whose clock moves by what its steps cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from statistics import median

import pytest

from ropeway.core.fair_service import VirtualTokenCounters
from ropeway.core.kv_manager import KVManager
from ropeway.core.pacing import Ahead, FixedTokenBudget, StepLoad
from ropeway.core.params import ServiceTerms
from ropeway.core.plan import StepPlan, StepResult
from ropeway.core.policy import FirstComeFirstServed, Policy, PriorityOrder
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.core.sequence import Sequence
from ropeway.core.step_time import StepCosts, StepWork, num_pairs
from ropeway.core.timed_pacing import MARGIN, PacingTargets, TimedPacing
from ropeway.core.waiting_line import WaitingLine
from ropeway.errors import ConfigError, OverloadedError
from support.scheduling import make_request, make_scheduler, run_step, sampled_ids
from support.stand_in import StandIn

COSTS = StepCosts(6e-3, 9e-4, 9e-4, 7e-7, 6e-4)


def work_of(plan: StepPlan) -> StepWork:
    shares = [1.0] * plan.num_rows
    if plan.layer_slice is not None:
        shares[-1] = plan.layer_slice.share(30)
    rows = list(zip(plan.starts, plan.num_tokens, shares, strict=True))
    return StepWork(
        sum(share * count for _, count, share in rows),
        sum(share * num_pairs(start, count) for start, count, share in rows),
        sum(plan.is_sampled),
        sum(share * (start + count) for start, count, share in rows),
    )


@dataclass
class Drive:
    """A scheduler under `pacing` on a machine of `costs`, which may not be those that the pacing was told."""

    pacing: TimedPacing
    costs: StepCosts = COSTS
    now_s: float = 0.0
    steps: list[tuple[StepPlan, float]] = field(default_factory=list)
    line: WaitingLine | None = None

    def __post_init__(self) -> None:
        limits = SchedulerLimits(256, 2048, 100_000)
        self.scheduler = Scheduler(limits, KVManager([20_000], 16), line=self.line, pacing=self.pacing)

    def add(self, name: str, num_prompt_tokens: int, max_tokens: int) -> None:
        self.scheduler.add(make_request(name, num_prompt_tokens, max_tokens), self.now_s)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.now_s)
        assert plan is not None
        step_s = self.costs.seconds(work_of(plan))
        self.now_s += step_s
        self.steps.append((plan, step_s))
        ids = sampled_ids(plan)
        self.scheduler.commit(plan, StepResult(plan.step_id, ids, (1,) * len(ids)), self.now_s)
        return plan

    @property
    def num_answered(self) -> int:
        return self.scheduler.stats().num_finished["length"]

    def decode_s(self, num_rows: int, context: int = 0) -> float:
        return self.costs.seconds(StepWork(num_rows, num_rows * context, num_rows))


def pacing(prior: StepCosts = COSTS, num_layers: int = 1, **targets: object) -> TimedPacing:
    targets = {"max_num_tokens": 2048, **targets}
    return TimedPacing(PacingTargets(**targets), prior, num_layers)  # type: ignore[arg-type]


def decoding(drive: Drive, count: int) -> None:
    """`count` sequences that decode for long, and nothing else."""
    for number in range(count):
        drive.add(f"decoding {number}", 32, 5000)
    while (plan := drive.step()).num_tokens != (1,) * count or not all(plan.is_sampled):
        pass


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("prior", [COSTS, StepCosts(3e-3, 2e-3, 2e-3, 0.0, 0.0)])
def test_balanced_bounds_steps_and_keeps_prompts_going(count: int, prior: StepCosts) -> None:
    drive = Drive(pacing(prior))
    decoding(drive, count)
    drive.steps.clear()
    for _ in range(50):
        drive.step()
    undisturbed_s = sorted(step_s for _, step_s in drive.steps)[25]
    drive.add("long", 4000, 1)
    begin_s = drive.now_s
    drive.steps.clear()
    while not drive.num_answered:
        drive.step()
    times_s = sorted(step_s for _, step_s in drive.steps)
    assert times_s[len(times_s) * 99 // 100 - 1] <= 2.5 * undisturbed_s
    alone_s = COSTS.seconds(StepWork(4000, num_pairs(0, 4000), 1))
    assert alone_s / (drive.now_s - begin_s) >= 0.4


@pytest.mark.parametrize("deviation", [0.02, 0.08, 0.12])
def test_the_less_predictable_steps_are_the_shorter_they_are_planned(deviation: float) -> None:
    rng = random.Random(0)
    drive = Drive(pacing())

    def step() -> StepPlan:
        speed = rng.lognormvariate(0.0, deviation)
        drive.costs = StepCosts(*[speed * cost for cost in astuple(COSTS)])
        return drive.step()

    decoding(drive, 8)
    for _ in range(50):
        step()
    drive.add("long", 4000, 1)
    drive.steps.clear()
    while not drive.num_answered:
        step()
    ratios = sorted([step_s / COSTS.seconds(StepWork(8, sum(plan.starts[:8]) + 8, 8)) for plan, step_s in drive.steps])
    assert ratios[len(ratios) * 99 // 100 - 1] <= 2.5
    assert median(ratios) >= 1.6, "prompts keep their share"


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("told", [0.7, 1.4])
def test_steps_are_measured_by_what_decodes_take_undisturbed(count: int, told: float) -> None:
    """Where a step with prompts takes more, or less, than its parts, what is learned of it tells wrong of decodes."""
    drive = Drive(pacing())
    decoding(drive, count)
    drive.steps.clear()
    drive.add("long", 4000, 1)
    while not drive.num_answered:
        is_alone = drive.num_answered == 0 and drive.pacing._undisturbed.is_look_due
        drive.costs = COSTS if is_alone else StepCosts(*[cost * told for cost in astuple(COSTS)])
        drive.step()
    ratios = [
        step_s / COSTS.seconds(StepWork(count, sum(plan.starts[:count]) + count, count)) for plan, step_s in drive.steps
    ]
    assert 1.6 <= median(ratios[len(ratios) // 2 :]) <= 2.3


@pytest.mark.parametrize(("max_tokens", "is_crowd"), [(1, False), (64, True)])
def test_a_line_is_a_crowd_where_its_prompts_will_decode(max_tokens: int, is_crowd: bool) -> None:
    drive = Drive(pacing())
    decoding(drive, 1)
    undisturbed_s = drive.decode_s(1, 40)
    longest_s = 0.0
    for number in range(100):
        if drive.scheduler.stats().num_running + drive.scheduler.stats().num_waiting < 12:
            drive.add(str(number), 100, max_tokens)
        has_answered = drive.scheduler.stats().num_finished["length"] > 0
        drive.step()
        if has_answered:
            longest_s = max(longest_s, drive.steps[-1][1])
    assert (longest_s > 2.5 * undisturbed_s) == is_crowd


@pytest.mark.parametrize(
    ("num_decodes", "num_prompts", "limit_s"),
    [(1, 1, 0.072), (1, 4, 0.108), (8, 2, 0.17), (1, 20, 0.25), (32, 20, 0.25), (64, 20, 3 * 0.134)],
)
def test_a_crowd_may_take_a_quarter_of_a_second(num_decodes: int, num_prompts: int, limit_s: float) -> None:
    """Or three times the decodes of everybody, where that is more; but never more than eight times."""
    drive = Drive(pacing())
    decoding(drive, num_decodes)
    drive.steps.clear()
    for number in range(num_prompts):
        drive.add(str(number), 100, 64)
    drive.step()
    drive.step()
    assert max(step_s for _, step_s in drive.steps) == pytest.approx(limit_s, rel=0.02)


def test_objectives_in_order() -> None:
    times_s = {}
    for objective in ("latency", "balanced", "throughput"):
        drive = Drive(pacing(objective=objective))
        decoding(drive, 8)
        drive.add("long", 3000, 1)
        drive.steps.clear()
        drive.step()
        times_s[objective] = drive.steps[0][1] / drive.decode_s(8, 40)
    assert 1.1 < times_s["latency"] <= 1.35
    assert 1.75 < times_s["balanced"] <= 2.15
    assert times_s["throughput"] > 8


def test_prompts_alone_get_full_steps_and_never_more_than_the_bound_of_tokens() -> None:
    drive = Drive(pacing())
    drive.add("long", 4000, 1)
    assert drive.step().total_num_tokens > 100 and 0.15 < drive.steps[0][1] <= 0.2
    fast = StepCosts(1e-3, 1e-6, 1e-6, 0.0, 1e-6)
    drive = Drive(pacing(fast, max_num_tokens=512), fast)
    drive.add("long", 4000, 1)
    assert drive.step().total_num_tokens == 512


def test_what_does_not_fit_one_token_is_saved_until_it_does() -> None:
    """A token far into a long prompt may cost more than a step has left; its turn comes, and nobody overtakes it."""
    costs = StepCosts(1e-3, 1e-4, 1e-4, 1e-5, 0.0)
    subject = pacing(costs)
    load = StepLoad(1, 1, 100, 0, num_prompts=1, num_prefilled_tokens=1000)
    num_steps = 0
    while not subject.begin_step(load, 0.0).num_prefill_tokens(1000):  # 10 ms, of 1.3 ms a step
        num_steps += 1
        assert subject.begin_step(load, 0.0).max_num_running >= 1
        budget = subject.begin_step(load, 0.0)
        assert budget.num_prefill_tokens(1000) == 0 and budget.num_prefill_tokens(0) == 0
        subject.on_computed(a_plan(), costs.seconds(StepWork(1, 1, 1)))
    assert 5 <= num_steps <= 10


def a_plan() -> StepPlan:
    return StepPlan(0, (0,), (0,), (1,), (True,), ())


def test_a_step_without_decodes_holds_a_token_however_long_it_takes() -> None:
    subject = pacing(StepCosts(1.0, 1.0, 1.0, 1.0, 1.0))
    assert subject.begin_step(StepLoad(0, 0, 10), 0.0).num_prefill_tokens(5000) == 1


def test_a_tpot_target_bounds_steps_and_the_batch() -> None:
    tpot_s = 0.04
    drive = Drive(pacing(tpot_s=tpot_s))
    for number in range(100):
        drive.add(str(number), 50, 60)
    for _ in range(150):
        drive.step()
    with_decodes = [step_s for plan, step_s in drive.steps if plan.num_tokens[0] == 1]
    assert max(with_decodes) <= tpot_s
    stats = drive.scheduler.stats()
    assert stats.num_running < 25 and stats.pacing is not None
    assert stats.pacing.num_answers == stats.pacing.num_in_tpot > 10
    assert not stats.pacing.is_tpot_out_of_reach
    assert sum(with_decodes[50:]) / len(with_decodes[50:]) > 0.75 * tpot_s, "the target leaves time unused"


@pytest.mark.parametrize("tpot_s", [0.04, 0.004])
@pytest.mark.parametrize(
    ("make_policy", "those", "newcomer"),
    [
        (FirstComeFirstServed, ServiceTerms(is_background=True), ServiceTerms()),
        (VirtualTokenCounters, ServiceTerms(tenant="flood"), ServiceTerms(tenant="new")),
        (lambda: PriorityOrder(60.0), ServiceTerms(priority=5), ServiceTerms(priority=0)),
    ],
)
def test_where_a_tpot_target_leaves_no_place_others_make_way(
    tpot_s: float, make_policy: Callable[[], Policy], those: ServiceTerms, newcomer: ServiceTerms
) -> None:
    drive = Drive(pacing(tpot_s=tpot_s), line=WaitingLine(make_policy))
    for number in range(40):
        drive.scheduler.add(make_request(str(number), 20, 500, terms=those), drive.now_s)
    for _ in range(120):
        drive.step()
    num_running = drive.scheduler.stats().num_running
    assert num_running < 25, "the target leaves no more places"
    (sequence,) = drive.scheduler.add(make_request("newcomer", 20, 5, terms=newcomer), drive.now_s)
    plan = drive.step()
    assert len(plan.preempted_ids) == 1 and sequence.sequence_id in drive.scheduler._roster.running
    assert drive.scheduler.stats().num_running == num_running
    while sequence.finish_reason is None:
        assert not drive.step().preempted_ids, "one place is what it took"
        drive.scheduler.check_invariants()


def test_an_impossible_tpot_target_is_told_and_everybody_is_served() -> None:
    drive = Drive(pacing(tpot_s=0.004))
    for number in range(3):
        drive.add(str(number), 20, 5)
    drive.step()
    drive.step()
    stats = drive.scheduler.stats().pacing
    assert stats is not None and stats.is_tpot_out_of_reach
    for _ in range(300):
        if drive.scheduler.has_work:
            drive.step()
    assert not drive.scheduler.has_work


def test_answers_that_miss_tighten_the_margin() -> None:
    """The machine is slower, at random, than any model can know: requests still hold the target."""
    tpot_s = 0.05
    drive = Drive(pacing(tpot_s=tpot_s))
    for number in range(300):
        drive.add(str(number), 40, 30)
    for number in range(2000):
        if not drive.scheduler.has_work:
            break
        drive.costs = StepCosts(6e-3, 9e-4, 9e-4, 7e-7, 6e-4 * (3 if number % 3 == 0 else 1))
        drive.step()
    stats = drive.scheduler.stats().pacing
    assert stats is not None and stats.num_answers == 300
    assert stats.num_in_tpot >= 0.95 * stats.num_answers


def test_answers_that_end_by_their_text_count_until_their_last_token() -> None:
    drive = Drive(pacing(tpot_s=0.04))
    for number in range(3):
        drive.add(str(number), 20, 50)
    for _ in range(12):
        drive.step()
    drive.now_s += 10.0  # until the text is looked at
    for number in range(2):
        drive.scheduler.stop(str(number), 0)
    drive.add("waits", 20, 50)
    drive.scheduler.stop("waits", 0)
    stats = drive.scheduler.stats().pacing
    assert stats is not None and stats.num_answers == stats.num_in_tpot == 2


def test_a_ttft_target_refuses_what_would_come_too_late() -> None:
    drive = Drive(pacing(ttft_s=1.0))
    accepted = 0
    with pytest.raises(OverloadedError, match="too late for the target of 1 s") as refusal:
        for number in range(100):
            drive.add(str(number), 100, 10)
            accepted += 1
    assert 7 <= accepted <= 9, "0.09 s each, up to 0.8 of the target"
    assert refusal.value.retry_after_s is not None and 0 < refusal.value.retry_after_s < 0.5
    stats = drive.scheduler.stats().pacing
    assert stats is not None and stats.is_overloaded and stats.num_refused == 1
    while drive.scheduler.has_work:
        drive.step()
    stats = drive.scheduler.stats().pacing
    assert stats is not None and stats.num_first_tokens == accepted == stats.num_in_ttft
    drive.add("later", 100, 10)
    again = drive.scheduler.stats().pacing
    assert again is not None and not again.is_overloaded


def test_a_line_that_was_slow_is_forgotten_once_nobody_waits() -> None:
    subject = pacing(ttft_s=1.0)
    for _ in range(500):  # memory was full: nobody's prompt was computed, for 4 s
        subject.begin_step(StepLoad(1, 1, 0, 500), 0.0)
        subject.on_computed(a_plan(), COSTS.seconds(StepWork(1, 1, 1)))
    with pytest.raises(OverloadedError):
        subject.check_arrival(100, Ahead(500))
    subject.begin_step(StepLoad(1, 100), 0.0)
    subject.on_computed(a_plan(), 0.01)
    subject.check_arrival(100, Ahead())


@pytest.mark.parametrize("end", ["abort", "expire", "fail"])
def test_nobody_is_refused_for_a_prompt_that_went_before_it_was_computed(end: str) -> None:
    """However it went, and though no step has been planned since: an idle engine plans none."""
    drive = Drive(pacing(ttft_s=5.0))
    terms = ServiceTerms(timeout_s=1.0)
    drive.scheduler.add(make_request("long", 3400, 4, terms=terms), drive.now_s)
    drive.step()
    drive.step()
    if end == "abort":
        drive.scheduler.abort("long")
    elif end == "expire":
        drive.now_s += 1.0
        drive.scheduler.expire(drive.now_s)
    else:
        plan = drive.scheduler.plan(drive.now_s)
        assert plan is not None
        drive.scheduler.fail(plan, drive.now_s)
    assert not drive.scheduler.has_work
    drive.add("next", 3400, 4)


def test_nobody_is_refused_for_answers_that_have_ended() -> None:
    drive = Drive(pacing(ttft_s=2.0, tpot_s=0.04))
    decoding(drive, 15)
    with pytest.raises(OverloadedError):
        drive.add("beside them", 1000, 4)
    for number in range(15):
        drive.scheduler.abort(f"decoding {number}")
    drive.add("alone", 1000, 4)


def test_an_arrival_is_told_of_what_prefills_and_decodes_at_that_moment() -> None:
    told = []

    class Watched(StandIn):
        def check_arrival(self, num_tokens: int, ahead: Ahead) -> None:
            told.append(ahead)

    scheduler = make_scheduler(max_num_seqs=2, pacing=Watched(FixedTokenBudget(8)))
    for name, num_prompt_tokens in (("decodes", 4), ("prefills", 20), ("waits", 7)):
        scheduler.add(make_request(name, num_prompt_tokens, 9), 0.0)
    run_step(scheduler)
    scheduler.add(make_request("comes", 1, 9), 0.0)
    scheduler.abort("decodes")
    scheduler.add(make_request("comes, too", 1, 9), 0.0)
    assert told[-2:] == [Ahead(7, 16, 1), Ahead(8, 16, 0)]


def test_a_ttft_target_stretches_steps_as_far_as_the_line_needs() -> None:
    waits_s = {}
    for ttft_s in (None, 1.2):
        drive = Drive(pacing(ttft_s=ttft_s))
        decoding(drive, 2)
        begin_s = drive.now_s
        for number in range(8):
            drive.add(str(number), 100, 1)
        while drive.num_answered < 8:
            drive.step()
        waits_s[ttft_s] = drive.now_s - begin_s
    assert waits_s[1.2] < 1.2 and waits_s[1.2] < 0.9 * waits_s[None], waits_s


BACKGROUND = ServiceTerms(is_background=True)


def test_background_prompts_stretch_no_step_for_a_ttft_target() -> None:
    drive = Drive(pacing(ttft_s=1.2))
    decoding(drive, 2)
    drive.scheduler.add(make_request("batch", 4000, 1, terms=BACKGROUND), drive.now_s)
    drive.steps.clear()
    for _ in range(20):
        drive.step()
    assert max(step_s for _, step_s in drive.steps) <= 2.5 * drive.decode_s(2, 60)


def test_background_prompts_refuse_nobody() -> None:
    drive = Drive(pacing(ttft_s=5.0))
    for number in range(2):
        drive.scheduler.add(make_request(f"batch {number}", 4000, 1, terms=BACKGROUND), drive.now_s)
    drive.step()
    drive.add("beside them", 3400, 4)
    subject = pacing(ttft_s=1.0)
    for _ in range(500):  # nobody else waited, for 4 s
        subject.begin_step(StepLoad(1, 1, 0, 500, num_background_tokens=500), 0.0)
        subject.on_computed(a_plan(), COSTS.seconds(StepWork(1, 1, 1)))
    subject.check_arrival(100, Ahead(100))


def test_background_answers_count_towards_no_target() -> None:
    subject = pacing(ttft_s=1.0, tpot_s=0.05)
    sequence = Sequence(0, make_request("batch", 4, 9, terms=BACKGROUND), 0)
    subject.on_first_token(sequence, 100.0)
    sequence.first_token_s, sequence.num_tokens = 100.0, 13
    subject.on_finished(sequence, 200.0)
    stats = subject.stats()
    assert stats.num_first_tokens == stats.num_answers == 0 and subject._margin == MARGIN


def test_one_that_lost_its_memory_with_an_answer_begun_waits_for_no_first_token() -> None:
    loads = []

    class Watched(StandIn):
        def begin_step(self, load: StepLoad, now_s: float) -> object:
            loads.append(load)
            return self._original.begin_step(load, now_s)

    scheduler = make_scheduler(num_blocks=4, block_size=2, pacing=Watched(FixedTokenBudget(64)))
    for number in range(2):
        scheduler.add(make_request(str(number), 2, 6), 0.0)
    for second in range(4):
        plan, _ = run_step(scheduler, now_s=float(second))
    assert plan.preempted_ids == (1,) and (loads[-1].num_queued_tokens, loads[-1].longest_wait_s) == (5, 0.0)
    scheduler = make_scheduler(max_num_seqs=1, pacing=Watched(FixedTokenBudget(64)))
    for number in range(2):
        scheduler.add(make_request(str(number), 2, 6), 0.0)
    for second in range(4):
        run_step(scheduler, now_s=float(second))
    assert (loads[-1].num_queued_tokens, loads[-1].longest_wait_s) == (2, 3.0)


@pytest.mark.parametrize("targets", [{"max_num_tokens": 0}, {"ttft_s": 0.0}, {"tpot_s": -1.0}])
def test_targets_out_of_range(targets: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        pacing(**targets)


@pytest.mark.parametrize(("read_s", "takes_turns"), [(1e-5, True), (1e-8, False)])
def test_long_prompts_take_steps_in_turn_where_reading_the_keys_of_both_costs_much(
    read_s: float, takes_turns: bool
) -> None:
    costs = StepCosts(6e-3, 9e-4, 9e-4, 1e-7, 6e-4, read_s)
    drive = Drive(pacing(costs), costs)
    decoding(drive, 4)
    drive.add("a", 8000, 1)
    for _ in range(30):
        drive.step()
    drive.add("short", 4, 1)
    drive.step()
    drive.step()
    assert drive.scheduler.stats().num_finished["length"] == 1, "it waited behind the long prompt"
    drive.add("b", 8000, 1)
    for _ in range(100):
        drive.step()
    chunks = [dict(zip(plan.sequence_ids[4:], plan.num_tokens[4:], strict=True)) for plan, _ in drive.steps[-80:]]
    counts = [len(chunk) for chunk in chunks if chunk]  # some steps look at what decodes take alone
    assert counts == [1 if takes_turns else 2] * len(counts) and 77 <= len(counts) < 80
    num_tokens = [sum(chunk.get(sequence_id, 0) for chunk in chunks) for sequence_id in (4, 6)]
    assert min(num_tokens) > 0.4 * sum(num_tokens), "each has half"
    num_turns = [sum(sequence_id in chunk for chunk in chunks) for sequence_id in (4, 6)]
    assert min(num_turns) > 0.4 * len(chunks), "of the steps too"


DEEP_COSTS = StepCosts(6e-3, 9e-4, 9e-4, 7e-7, 6e-4, read_s=1.1e-6)


@pytest.mark.parametrize(
    ("objective", "num_tokens", "most", "least"), [("balanced", 7500, 2.3, 0.4), ("latency", 2500, 1.5, 0.1)]
)
def test_beside_one_answer_a_long_prompt_goes_in_waves(
    objective: str, num_tokens: int, most: float, least: float
) -> None:
    """Of the tokens of a step of its own, reading their keys would leave room for one."""
    drive = Drive(pacing(DEEP_COSTS, num_layers=30, objective=objective), DEEP_COSTS)
    decoding(drive, 1)
    drive.add("long", num_tokens, 1)
    begin_s = drive.now_s
    drive.steps.clear()
    while not drive.num_answered:
        drive.step()
    slices = [plan.layer_slice for plan, _ in drive.steps if plan.layer_slice is not None]
    assert len(slices) > 200 and all(2 <= layer_slice.count <= 10 for layer_slice in slices)
    assert drive.steps[0][0].layer_slice is None, "the first chunks read little"
    contexts = [plan.starts[0] + 1 for plan, _ in drive.steps]
    decode_s = [DEEP_COSTS.seconds(StepWork(1, context, 1, context)) for context in contexts]
    ratios = sorted([step_s / alone_s for (_, step_s), alone_s in zip(drive.steps, decode_s, strict=True)])
    assert ratios[len(ratios) * 99 // 100 - 1] <= most
    alone_s = DEEP_COSTS.seconds(StepWork(num_tokens, num_pairs(0, num_tokens), 1))
    assert alone_s / (drive.now_s - begin_s) >= least


def long_prompt_beside(count: int, num_layers: int, objective: str = "balanced") -> Drive:
    """A prompt of 7,500 tokens was computed beside so many decodes, in the steps of the drive."""
    drive = Drive(pacing(DEEP_COSTS, num_layers=num_layers, objective=objective), DEEP_COSTS)
    decoding(drive, count)
    drive.add("long", 7500, 1)
    drive.steps.clear()
    while not drive.num_answered:
        drive.step()
    return drive


@pytest.mark.parametrize(("num_layers", "objective"), [(1, "balanced"), (30, "throughput")])
def test_there_are_no_waves_of_one_layer_or_of_whole_chunks(num_layers: int, objective: str) -> None:
    assert not any(plan.layer_slice for plan, _ in long_prompt_beside(1, num_layers, objective).steps)


@pytest.mark.parametrize(("count", "num_slices", "least_gain"), [(8, {2, 3}, 0.05), (32, {2}, 0.02)])
def test_where_chunks_are_a_few_tokens_short_waves_use_what_those_leave(
    count: int, num_slices: set[int], least_gain: float
) -> None:
    drives = {num_layers: long_prompt_beside(count, num_layers) for num_layers in (1, 30)}
    counts = [plan.layer_slice.count for plan, _ in drives[30].steps if plan.layer_slice is not None]
    assert len(counts) > len(drives[30].steps) // 4 and set(counts) == num_slices, "whoever comes waits for their end"
    assert len(drives[30].steps) < (1 - least_gain) * len(drives[1].steps)


def test_a_prompt_that_is_aborted_in_a_wave_makes_room_for_another() -> None:
    drive = Drive(pacing(DEEP_COSTS, num_layers=30), DEEP_COSTS)
    decoding(drive, 1)
    drive.add("long", 7500, 1)
    while (layer_slice := drive.step().layer_slice) is None or layer_slice.index != 1:
        pass
    drive.scheduler.check_invariants()
    drive.scheduler.abort("long")
    drive.add("next", 7000, 1)
    assert drive.step().layer_slice is None
    drive.scheduler.check_invariants()
    while not drive.scheduler.stats().num_finished["length"]:
        drive.step()


def test_a_chunk_that_grows_reads_its_keys_once() -> None:
    """A lone long prompt is given half of a step, then the rest: what a step holds is what its time is learned by."""
    costs = StepCosts(6e-3, 9e-4, 9e-4, 7e-7, 6e-4, read_s=7e-7)
    works = []

    class Watched(StandIn):
        def on_computed(self, plan: StepPlan, step_s: float) -> None:
            budget = self._original._budget
            works.append((budget.work.num_reads, sum(plan.starts) + plan.total_num_tokens))
            self._original.on_computed(plan, step_s)

    drive = Drive(Watched(pacing(costs)))  # type: ignore[arg-type]
    decoding(drive, 8)
    drive.add("long", 6000, 1)
    works.clear()
    while not drive.num_answered:
        drive.step()
    assert len(works) > 100 and all(reads == expected for reads, expected in works)
