"""Where the time of a step goes: a real engine, driven in this process, at a chosen batch, context and prefill chunk.

Owns the driving and the stop-watches around the parts; the native phases time themselves. Knows the engine's parts by
their protocols and the server's event writer; sends nothing anywhere.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from ropeway.backends.batch import Backend
from ropeway.backends.native import NativeBackend
from ropeway.bench.plot import Bar, render_stacked_bars
from ropeway.catalog import resolve_model
from ropeway.config import EngineConfig
from ropeway.core.params import Request, SamplingParams
from ropeway.core.plan import StepPlan
from ropeway.core.scheduler import Scheduler
from ropeway.engine.engine import Engine
from ropeway.engine.runner import Runner
from ropeway.errors import ConfigError
from ropeway.inputs import EncodedPrompt
from ropeway.llm import PreparedModel, prepare_model, scheduler_recipe
from ropeway.machine_limits import MachineLimits, measure_limits
from ropeway.model.loading import load_model
from ropeway.outputs import Assembler
from ropeway.server.choices import Wishes
from ropeway.server.formats import CompletionFormat
from ropeway.server.openai import ChunkWriter, Generation

NUM_WARMUP_STEPS = 4
FILL_TOKENS = 2048  # per step while the contexts are filled
FIRST_TOKEN_ID = 100
BETWEEN_PHASES = "checks and planning"
OTHER_PYTHON = "other Python"


@dataclass(frozen=True, slots=True)
class StepBenchOptions:
    """batch: sequences that decode, each behind `context` tokens. prefill_tokens: of a fresh prompt, in every step."""

    model: str
    batches: tuple[int, ...]
    context: int
    prefill_tokens: int = 0
    num_threads: int | None = None
    num_steps: int = 32
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step. group: forward | sample | Python. step_s: mean seconds per step."""

    group: str
    name: str
    step_s: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Means over the measured steps, but median_s. parts add up to step_s.

    mean_context: of the decoding sequences, which grows by one with every step. num_tokens: computed per step.
    lock_wait_s: within the parts, time until native calls had the interpreter lock again (nobody else runs here).
    """

    batch: int
    mean_context: float
    prefill_tokens: int
    num_tokens: float
    num_steps: int
    num_threads: int
    step_s: float
    median_s: float
    parts: tuple[Part, ...]
    lock_wait_s: float
    arithmetic_share: float | None
    bandwidth_share: float

    def group_s(self, group: str) -> float:
        return sum(part.step_s for part in self.parts if part.group == group)

    @property
    def label(self) -> str:
        prefill = f", prefill {self.prefill_tokens}" if self.prefill_tokens else ""
        return f"batch {self.batch}, context {self.mean_context:.0f}{prefill}"


class StopWatch:
    """Adds up the time of named parts."""

    def __init__(self) -> None:
        self.total_s: dict[str, float] = defaultdict(float)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.total_s[name] += time.perf_counter() - start_s

    def around(self, target: object, *methods: str) -> Any:
        """An object like `target` whose `methods` are timed under their names."""
        return _Timed(target, {name: self._timed(name, getattr(target, name)) for name in methods})

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            with self.running(name):
                return call(*args)

        return timed


class _Timed:
    def __init__(self, target: object, timed: Mapping[str, Callable[..., Any]]) -> None:
        self.__dict__.update(timed)
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _PlanCounter:
    """A scheduler that adds up what its plans compute."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.num_tokens = self.num_steps = 0
        self.decode_starts: list[int] = []

    def plan(self, now_s: float) -> StepPlan | None:
        plan = self._scheduler.plan(now_s)
        if plan is not None:
            self.num_steps += 1
            self.num_tokens += plan.total_num_tokens
            self.decode_starts += [
                start for start, num in zip(plan.starts, plan.num_tokens, strict=True) if start and num == 1
            ]
        return plan

    def clear(self) -> None:
        self.num_tokens = self.num_steps = 0
        self.decode_starts.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class _Driver:
    """One engine at one batch size, with the text side of a server behind it."""

    def __init__(self, prepared: PreparedModel, options: StepBenchOptions, batch: int) -> None:
        self._options = options
        self._batch = batch
        self._tokenizer = prepared.builder.tokenizer
        self._builder = prepared.builder
        facts, num_groups = prepared.facts, len(prepared.model.program.cache_groups)
        facts = replace(facts, max_num_batched_tokens=max(FILL_TOKENS, batch + options.prefill_tokens))
        recipe = scheduler_recipe(facts, num_cache_groups=num_groups)
        self.watch = StopWatch()
        self.plans = _PlanCounter(recipe.make())
        backend = cast(Backend, self.watch.around(prepared.backend, "forward", "sample"))
        runner = Runner(
            backend,
            max_num_seqs=recipe.max_num_seqs,
            max_model_len=facts.max_model_len,
            num_cache_groups=num_groups,
        )
        scheduler = cast(Scheduler, self.watch.around(self.plans, "plan", "commit"))
        self._engine = Engine(scheduler, self.watch.around(runner, "launch", "collect"), time.monotonic)
        self._random = np.random.default_rng(options.seed)
        self._texts: dict[str, tuple[Assembler, ChunkWriter]] = {}
        self._num_requests = 0

    def submit(self, num_prompt_tokens: int, max_tokens: int) -> str:
        ids = self._random.integers(FIRST_TOKEN_ID, self._tokenizer.vocab_size, num_prompt_tokens).tolist()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0)
        self._num_requests += 1
        request_id = f"cmpl-{self._num_requests:032x}"
        request: Request = self._builder.build(EncodedPrompt(tuple(ids)), params, request_id)
        generation = Generation(
            request_id, self._options.model, int(time.time()), (request,), False, Wishes(), self._tokenizer
        )
        self._texts[request_id] = (
            Assembler(request, self._tokenizer),
            ChunkWriter(generation, CompletionFormat(self._tokenizer)),
        )
        self._engine.submit(request)
        return request_id

    def step(self) -> float:
        """One step and the text of what it brought; seconds."""
        if self._options.prefill_tokens:
            self.submit(self._options.prefill_tokens, 1)
        start_s = time.perf_counter()
        events = self._engine.step()
        deltas = []
        with self.watch.running("detokenise"):
            for event in events:
                delta = self._texts[event.request_id][0].push(event)
                if delta is not None:
                    deltas.append(delta)
        with self.watch.running("encode"):
            for delta in deltas:
                self._texts[delta.request_id][1].chunk(delta)
        end_s = time.perf_counter()
        for event in events:
            if event.finish_reason is not None:
                del self._texts[event.request_id]
        return end_s - start_s

    def fill(self, max_tokens: int) -> None:
        """Brings every sequence of the batch to its first output token."""
        missing = {self.submit(self._options.context, max_tokens) for _ in range(self._batch)}
        while missing:
            missing -= {event.request_id for event in self._engine.step()}

    def close(self) -> None:
        """Ends what runs, so that another driver finds the pool unused."""
        for request_id in list(self._texts):
            self._engine.abort(request_id)


def run_step_bench(options: StepBenchOptions, progress: Callable[[str], None]) -> list[StepProfile]:
    """A profile per batch size, one after the other on one loaded model. progress: told what is being done.

    Raises as `prepare_model` does, and ConfigError where the context is longer than the model's.
    """
    largest = max(options.batches)
    num_fill_steps = -(-largest * options.context // FILL_TOKENS) + 1
    max_tokens = num_fill_steps + NUM_WARMUP_STEPS + options.num_steps + 2
    num_tokens = options.context + max_tokens
    progress(f"loading {options.model}")
    context_length = load_model(resolve_model(options.model)).program.context_length
    if max(num_tokens, options.prefill_tokens + 1) > context_length:
        raise ConfigError(
            f"a context of {options.context} tokens with {max_tokens} more for the steps, or a prompt of "
            f"{options.prefill_tokens}, does not fit the {context_length} tokens of {options.model}; ask for a context "
            f"of at most {context_length - max_tokens}"
        )
    blocks_per_sequence, blocks_per_prefill = -(-num_tokens // 16), -(-options.prefill_tokens // 16) + 1
    config = EngineConfig(
        max_num_seqs=largest + 2,
        max_num_batched_tokens=max(FILL_TOKENS, largest + options.prefill_tokens),
        max_model_len=max(num_tokens, options.prefill_tokens + 1),
        # A twentieth more than is used: admission keeps some blocks free.
        num_kv_blocks=(largest * blocks_per_sequence + 2 * blocks_per_prefill) * 21 // 20 + 2,
        num_threads=options.num_threads,
    )
    prepared = prepare_model(options.model, config)
    assert isinstance(prepared.backend, NativeBackend)
    progress("measuring the limits of this machine")
    limits = measure_limits(prepared.backend.num_threads, prepared.backend.isa)
    profiles = []
    for batch in options.batches:
        progress(f"filling {batch} contexts of {options.context} tokens")
        driver = _Driver(prepared, options, batch)
        driver.fill(max_tokens)
        progress(f"measuring {options.num_steps} steps")
        profiles.append(_measure(driver, prepared.backend, options, batch, limits))
        driver.close()
    return profiles


def _measure(
    driver: _Driver, backend: NativeBackend, options: StepBenchOptions, batch: int, limits: MachineLimits
) -> StepProfile:
    for _ in range(NUM_WARMUP_STEPS):
        driver.step()
    driver.watch.total_s.clear()
    driver.plans.clear()
    backend.set_profiling(True)
    backend.take_calls()
    work_before = backend.work
    lengths_s, lock_wait_s = [], 0.0
    for _ in range(options.num_steps):
        lengths_s.append(driver.step())
        lock_wait_s += sum(wait_s for _, wait_s in backend.take_calls())
    int8, f32, num_bytes = (now - then for now, then in zip(backend.work, work_before, strict=True))
    phases_s = {label: seconds for label, (_, seconds) in backend.profile().items()}
    backend.set_profiling(False)
    total_s = sum(lengths_s)
    arithmetic_s = limits.arithmetic_s(int8, f32)
    num_steps = options.num_steps
    return StepProfile(
        batch=batch,
        mean_context=statistics.fmean(driver.plans.decode_starts),
        prefill_tokens=options.prefill_tokens,
        num_tokens=driver.plans.num_tokens / driver.plans.num_steps,
        num_steps=num_steps,
        num_threads=backend.num_threads,
        step_s=total_s / num_steps,
        median_s=statistics.median(lengths_s),
        parts=_parts(driver.watch.total_s, phases_s, total_s, num_steps),
        lock_wait_s=lock_wait_s / num_steps,
        arithmetic_share=None if arithmetic_s is None else arithmetic_s / total_s,
        bandwidth_share=limits.read_s(num_bytes) / total_s,
    )


def _parts(
    watch_s: Mapping[str, float], phases_s: Mapping[str, float], total_s: float, num_steps: int
) -> tuple[Part, ...]:
    """Disjoint parts that add up to total_s: what no stop-watch saw is `other Python`."""
    phases = sorted(phases_s.items(), key=lambda item: -item[1])
    parts = [("forward", label, seconds) for label, seconds in phases]
    parts.append(("forward", BETWEEN_PHASES, watch_s["forward"] - sum(phases_s.values())))
    parts.append(("sample", "sample", watch_s["sample"]))
    python = {
        "plan": watch_s["plan"],
        "launch preparation": watch_s["launch"] + watch_s["collect"] - watch_s["forward"] - watch_s["sample"],
        "commit": watch_s["commit"],
        "detokenise": watch_s["detokenise"],
        "encode events": watch_s["encode"],
    }
    parts += [("Python", name, seconds) for name, seconds in python.items()]
    parts.append(("Python", OTHER_PYTHON, total_s - sum(seconds for _, _, seconds in parts)))
    return tuple(Part(group, name, seconds / num_steps) for group, name, seconds in parts)


def format_steps(profiles: Sequence[StepProfile]) -> str:
    """One line per batch size: how long a step takes and how well it uses the machine."""
    lines = [
        f"{'batch':>5} {'context':>7} {'tokens':>7} {'step, ms':>9} {'median':>7} {'tok/s':>8} "
        f"{'arithmetic':>10} {'bandwidth':>9} {'Python':>7}"
    ]
    for profile in profiles:
        arithmetic = "–" if profile.arithmetic_share is None else f"{profile.arithmetic_share:.0%}"
        lines.append(
            f"{profile.batch:>5} {profile.mean_context:>7.0f} {profile.num_tokens:>7.0f} {profile.step_s * 1e3:>9.2f} "
            f"{profile.median_s * 1e3:>7.2f} {profile.num_tokens / profile.step_s:>8.1f} {arithmetic:>10} "
            f"{profile.bandwidth_share:>9.0%} {profile.group_s('Python') / profile.step_s:>7.1%}"
        )
    return "\n".join(lines)


def format_profile(profile: StepProfile) -> str:
    """The parts of a step as a table, biggest first within forward, then sample and Python."""
    width = max(len(part.name) for part in profile.parts) + 2
    lines = [
        f"{profile.label}: mean of {profile.num_steps} steps on {profile.num_threads} threads",
        f"{'':{width + 2}}{'µs':>10} {'share':>7} {'µs/sequence':>12}",
    ]

    def line(name: str, seconds: float) -> str:
        per_sequence = seconds * 1e6 / profile.batch
        return f"{name:{width + 2}}{seconds * 1e6:>10,.1f} {seconds / profile.step_s:>7.1%} {per_sequence:>12.2f}"

    for group in ("forward", "sample", "Python"):
        members = [part for part in profile.parts if part.group == group]
        lines.append(line(group, profile.group_s(group)))
        if len(members) > 1:
            lines += [line(f"  {part.name}", part.step_s) for part in members]
    lines.append(line("step", profile.step_s))
    lines.append(f"of which waits for the interpreter lock: {profile.lock_wait_s * 1e6:.1f} µs")
    return "\n".join(lines)


def plot_profiles(model: str, profiles: Sequence[StepProfile]) -> str:
    """A stacked bar per batch size, as SVG; parts below a fiftieth of every step are drawn together."""
    native = [(part, profile) for profile in reversed(profiles) for part in profile.parts if part.group != "Python"]
    shown = dict.fromkeys(part.name for part, profile in native if part.step_s >= profile.step_s / 50)
    bars = []
    for profile in profiles:
        segments: dict[str, float] = dict.fromkeys(shown, 0.0)
        for part in profile.parts:
            name = part.name if part.name in shown else "Python" if part.group == "Python" else "other native"
            segments[name] = segments.get(name, 0.0) + part.step_s * 1e3
        bars.append(Bar(profile.label, tuple(segments.items())))
    return render_stacked_bars(f"A step of {model}, ms", bars)


def profile_document(options: StepBenchOptions, profiles: Sequence[StepProfile]) -> dict[str, Any]:
    """Options and profiles as plain data; times in seconds."""
    return {"options": asdict(options), "profiles": [asdict(profile) for profile in profiles]}
