"""Options of an engine: `EngineConfig` is intent, `resolve()` turns it once into `EngineFacts`.

Owns validation, and the arithmetic of the KV pool and of the effective context. Knows nothing of model files, backends,
machines or clocks: what a model needs arrives as `ModelFacts`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from ropeway.core.admission import AdmissionName
from ropeway.core.timed_pacing import Objective
from ropeway.errors import ConfigError, OutOfMemoryError

Batching = Literal["continuous", "static", "static-padded"]
BackendName = Literal["native", "reference"]
SchedulingPolicy = Literal["vtc", "fcfs", "priority", "spf"]

FREE_MEMORY_SHARE = 0.5
MAX_DEFAULT_KV_BYTES = 2 << 30
DEFAULT_NUM_SEQS = 128
DEFAULT_NUM_BATCHED_TOKENS = 2048
# Weights are repacked: at most 1.15 x the file; scratch buffers and the interpreter take the
# rest.
PACKED_WEIGHTS_RATIO = 1.15
WORKING_MEMORY_BYTES = 200 << 20

_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_kv_blocks",
    "num_threads",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asks of an engine; keyword arguments of `LLM` and flags of `ropeway serve` have these names.

    max_model_len: most tokens (prompt and output) of one sequence; None is the model's own context.
    max_num_seqs: most sequences running at once.
    max_num_batched_tokens: most tokens one step computes, however little time they would take.
    objective: how long steps may be for the sake of prompts, while others are answered: `balanced`, `throughput`,
        `latency`.
    slo_ttft_ms, slo_tpot_ms: targets for the time to the first token, and per token after it; None for none.
    admission: with what memory a sequence boards: `predictive` (as lengths learned of late let expect), `reserve`
        (prompt + max_tokens), `optimistic` (what is known).
    block_size: tokens per KV block.
    num_kv_blocks / kv_cache_memory: size of the KV pool in blocks, or in bytes (an int, or text such as "512M", "2G");
        with neither it is half of the free memory, at most 2 GiB, at most what max_num_seqs full contexts could use.
    batching: `continuous`, or the baselines `static` and `static-padded`.
    scheduling_policy: who comes first: `vtc` (tenants are served fairly; with one it is fcfs), `fcfs` (first come,
        first served), `priority` (lower numbers first), `spf` (shorter prompts first).
    priority_aging_s: seconds of waiting that outweigh one step of priority; 0 never lets them.
    background_share: of the newly computed tokens, what is guaranteed to background requests while they wait or run.
    enable_prefix_caching: prompts that begin alike share what is computed of them; None is yes, but for the baselines,
        which cannot.
    num_threads: of the native backend; None is one per processor that the process may use.
    isa: instruction set of the native kernels; None is the best this processor has.
    backend: `native`, or `reference` (numpy, slow, the oracle of the tests).
    max_num_queued_reqs, max_num_queued_tokens: most requests, and known tokens, that may wait to begin beside those
        that a free place is waiting for; more are refused as overload. None is no limit; offline there is none.
    decision_log: file to which every scheduling decision is written, for `ropeway replay`; decision_log_size: bytes (an
        int, or text such as "1G") before which that log ends.
    chat_template: the path of a Jinja2 template, or the template itself, instead of the model's own.
    served_model_name: the name (or names, the first is the answer's) that requests may give; None derives it from the
    model.

    Raises ConfigError for a value out of range.
    """

    max_model_len: int | None = None
    max_num_seqs: int = DEFAULT_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_NUM_BATCHED_TOKENS
    objective: Objective = "balanced"
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    admission: AdmissionName = "predictive"
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | str | None = None
    batching: Batching = "continuous"
    scheduling_policy: SchedulingPolicy = "vtc"
    priority_aging_s: float = 60.0
    background_share: float = 0.05
    enable_prefix_caching: bool | None = None
    num_threads: int | None = None
    isa: str | None = None
    backend: BackendName = "native"
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    decision_log: str | os.PathLike[str] | None = None
    decision_log_size: int | str = "1G"
    chat_template: str | os.PathLike[str] | None = None
    served_model_name: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        names = self.served_model_name
        names = (names,) if isinstance(names, str) else tuple(names or ())
        if not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"served_model_name must be a non-empty name, or several, not {self.served_model_name!r}")
        object.__setattr__(self, "served_model_name", names or None)
        for name in _COUNTS:
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        _check_positive("block_size", self.block_size)
        for name in ("slo_ttft_ms", "slo_tpot_ms"):
            if getattr(self, name) is not None:
                _check_time(name, getattr(self, name))
        _check_choice("objective", self.objective, get_args(Objective))
        _check_choice("admission", self.admission, get_args(AdmissionName))
        _check_choice("batching", self.batching, get_args(Batching))
        _check_choice("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        _check_span("priority_aging_s", self.priority_aging_s, low=0.0, high=86_400.0)
        _check_span("background_share", self.background_share, low=0.0, high=0.9)
        _check_prefix_caching(self.enable_prefix_caching, self.batching)
        _check_choice("backend", self.backend, get_args(BackendName))
        if self.isa is not None and (not isinstance(self.isa, str) or not self.isa):
            raise ConfigError(f"isa must be the name of an instruction set, not {self.isa!r}")
        for name in ("decision_log", "chat_template"):
            _check_path(name, getattr(self, name))
        log_bytes = parse_bytes("decision_log_size", self.decision_log_size)
        object.__setattr__(self, "decision_log_size", log_bytes)
        if self.kv_cache_memory is not None:
            if self.num_kv_blocks is not None:
                raise ConfigError("num_kv_blocks and kv_cache_memory both size the KV pool; give one of them")
            object.__setattr__(self, "kv_cache_memory", parse_bytes("kv_cache_memory", self.kv_cache_memory))

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> EngineConfig:
        """An EngineConfig from keyword options. Raises ConfigError for an unknown name, with the closest known ones."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=2)
                hint = f"did you mean {' or '.join(close)}?" if close else f"known options: {', '.join(known)}"
                raise ConfigError(f"unknown engine option {name!r}; {hint}")
        return cls(**options)  # type: ignore[arg-type]  # __post_init__ checks every value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What `resolve` needs to know of a model.

    context_length: positions it was trained for. kv_bytes_per_token: cache bytes of one position, all layers.
    weights_bytes: of its tensors in the file. name: what to serve it as, unless told otherwise.
    """

    name: str
    context_length: int
    kv_bytes_per_token: int
    weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """An `EngineConfig` made concrete for one model and one machine.

    max_model_len: the effective context: the least of what was asked, what the model has, and what the KV pool holds.
    slo_ttft_s, slo_tpot_s: the latency targets. warnings: one line each, for the log at start.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    objective: Objective
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    admission: AdmissionName
    block_size: int
    num_kv_blocks: int
    kv_cache_bytes: int
    batching: Batching
    scheduling_policy: SchedulingPolicy
    priority_aging_s: float
    background_share: float
    has_prefix_cache: bool
    num_threads: int | None
    isa: str | None
    backend: BackendName
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    decision_log: str | None
    decision_log_bytes: int
    served_model_names: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def resolve(config: EngineConfig, model: ModelFacts, free_memory_bytes: int) -> EngineFacts:
    """Turns intent into facts. `free_memory_bytes` is measured before the weights are packed.

    Raises ConfigError for a context beyond the model's, OutOfMemoryError where weights or KV pool do not fit.
    """
    wanted_len = config.max_model_len or model.context_length
    if wanted_len > model.context_length:
        raise ConfigError(
            f"max_model_len {wanted_len} is more than the {model.context_length} tokens that {model.name} was trained "
            f"for; ask for at most {model.context_length}"
        )
    num_kv_blocks = _num_kv_blocks(config, model, wanted_len, free_memory_bytes)
    num_slots = num_kv_blocks * config.block_size
    block_bytes = model.kv_bytes_per_token * config.block_size
    warnings = []
    if num_slots < wanted_len:
        warnings.append(
            f"the KV pool ({num_kv_blocks} blocks of {config.block_size}, {format_bytes(num_kv_blocks * block_bytes)}) "
            f"holds {num_slots} tokens, less than the context of {wanted_len}: the effective context is {num_slots}; "
            f"{format_bytes(-(-wanted_len // config.block_size) * block_bytes)} of kv_cache_memory would hold it all"
        )
    names = config.served_model_name
    return EngineFacts(
        max_model_len=min(wanted_len, num_slots),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        objective=config.objective,
        slo_ttft_s=None if config.slo_ttft_ms is None else config.slo_ttft_ms / 1000,
        slo_tpot_s=None if config.slo_tpot_ms is None else config.slo_tpot_ms / 1000,
        admission=config.admission,
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks,
        kv_cache_bytes=num_kv_blocks * block_bytes,
        batching=config.batching,
        scheduling_policy=config.scheduling_policy,
        priority_aging_s=config.priority_aging_s,
        background_share=config.background_share,
        has_prefix_cache=config.enable_prefix_caching is not False and config.batching == "continuous",
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        num_threads=config.num_threads,
        isa=config.isa,
        backend=config.backend,
        decision_log=None if config.decision_log is None else os.fspath(config.decision_log),
        decision_log_bytes=parse_bytes("decision_log_size", config.decision_log_size),
        served_model_names=tuple(names) if names else (model.name,),
        warnings=tuple(warnings),
    )


def _num_kv_blocks(config: EngineConfig, model: ModelFacts, context: int, free_memory_bytes: int) -> int:
    block_bytes = model.kv_bytes_per_token * config.block_size
    needed_bytes = int(model.weights_bytes * PACKED_WEIGHTS_RATIO) + WORKING_MEMORY_BYTES
    free_bytes = free_memory_bytes - needed_bytes
    if free_bytes < block_bytes:
        raise OutOfMemoryError(
            f"{model.name} needs {format_bytes(needed_bytes)} for weights and work, and {format_bytes(block_bytes)} "
            f"for one KV block, but {format_bytes(free_memory_bytes)} are free; free some memory or serve a smaller "
            "model"
        )
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif config.kv_cache_memory is not None:
        asked_bytes = parse_bytes("kv_cache_memory", config.kv_cache_memory)
        num_blocks = asked_bytes // block_bytes
        if num_blocks == 0:
            raise ConfigError(
                f"kv_cache_memory of {format_bytes(asked_bytes)} holds no block: one block of {config.block_size} "
                f"tokens takes {format_bytes(block_bytes)}"
            )
    else:
        share_bytes = min(int(free_bytes * FREE_MEMORY_SHARE), MAX_DEFAULT_KV_BYTES)
        most_usable = config.max_num_seqs * -(-context // config.block_size)
        num_blocks = max(1, min(share_bytes // block_bytes, most_usable))
    if num_blocks * block_bytes > free_bytes:
        raise OutOfMemoryError(
            f"a KV pool of {num_blocks} blocks takes {format_bytes(num_blocks * block_bytes)}, but "
            f"{format_bytes(free_bytes)} are free beside the weights; ask for at most {free_bytes // block_bytes} "
            "blocks"
        )
    return num_blocks


def parse_bytes(name: str, value: int | str) -> int:
    """A size in bytes from an int or from text such as "512M" or "2GiB" (powers of 1024). Raises ConfigError."""
    size = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kmgt]?)(?:i?b)?", value.strip().lower())
        size = int(float(match[1]) * _UNITS[match[2]]) if match else None
    if size is None or size < 1:
        raise ConfigError(f"{name} must be a size such as 512M or 2G, not {value!r}")
    return size


def format_bytes(size: int) -> str:
    """A size for people: 1.5 GiB."""
    for unit, width in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= width:
            return f"{size / width:.1f} {unit}"
    return f"{size} bytes"


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_span(name: str, value: object, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


def _check_time(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):  # type: ignore[operator]
        raise ConfigError(f"{name} must be a number of milliseconds above 0, not {value!r}")


def _check_prefix_caching(value: object, batching: str) -> None:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"enable_prefix_caching must be True or False, not {value!r}")
    if value and batching != "continuous":
        raise ConfigError(
            f"batching {batching!r} is a baseline without a prefix cache; leave enable_prefix_caching out, or choose "
            "continuous"
        )


def _check_path(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike | None):
        raise ConfigError(f"{name} must be the path of a file, not {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
