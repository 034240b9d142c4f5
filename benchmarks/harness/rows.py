"""The rows of the comparison: what is sent, how much of it, and who takes part. Knows nothing of how anyone is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ropeway.bench.report import Summary
from ropeway.bench.workload import (
    RAGGED_OUTPUTS,
    RAGGED_PROMPTS,
    BenchRequest,
    LengthDistribution,
    SyntheticWorkload,
    default_num_requests,
)

VOCAB_SIZE = 49152
# What Ropeway serves: its default Q4_1 file, or a Llama-shaped Q4_0 file of 1.2 billion random weights.
RowModel = Literal["default", "llama-1b"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a closed loop of `num_requests` at `concurrency`, each within `context_tokens`.

    only_best_peer: the target is against the best peer, so the peers that were behind it at the first seed sit out
    the others.
    """

    name: str
    concurrency: int
    num_requests: int
    context_tokens: int
    workload: SyntheticWorkload
    peers: tuple[str, ...]
    model: RowModel = "default"
    only_best_peer: bool = False

    def requests(self, seed: int) -> list[BenchRequest]:
        return self.workload.requests(self.num_requests, seed)

    @property
    def num_prompt_tokens(self) -> int:
        """Of one run, near enough to plan by."""
        return sum(len(request.prompt) for request in self.requests(0))

    @property
    def num_output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests(0))


def _ragged(concurrency: int, peers: tuple[str, ...], *, only_best_peer: bool = False) -> Row:
    workload = SyntheticWorkload(RAGGED_PROMPTS, RAGGED_OUTPUTS, vocab_size=VOCAB_SIZE)
    num_requests = default_num_requests(concurrency)
    return Row(f"c{concurrency}", concurrency, num_requests, 1024, workload, peers, only_best_peer=only_best_peer)


def _one_prompt(name: str, num_tokens: int, num_requests: int, context_tokens: int, peers: tuple[str, ...]) -> Row:
    """Prompts of one length, alone, one token out: time to first token is all there is."""
    workload = SyntheticWorkload(
        LengthDistribution(num_tokens, 0.0, num_tokens), LengthDistribution(1, 0.0, 1), vocab_size=VOCAB_SIZE
    )
    return Row(name, 1, num_requests, context_tokens, workload, peers)


def _llama_1b(concurrency: int) -> Row:
    """12 requests with short answers: the file is nine times the default model's."""
    workload = SyntheticWorkload(RAGGED_PROMPTS, LengthDistribution(24.0, 0.4, 32), vocab_size=VOCAB_SIZE)
    return Row(f"llama-1b-c{concurrency}", concurrency, 12, 1024, workload, ("llama-q4_0",), "llama-1b")


ROWS = {
    row.name: row
    for row in (
        _ragged(1, ("llama-q4_0", "openvino-int4")),
        _ragged(8, ("llama-q4_0", "openvino-int4"), only_best_peer=True),
        _ragged(32, ("llama-q4_0", "llama-q4_1", "openvino-int4")),
        _ragged(128, ("llama-q4_0", "openvino-int4"), only_best_peer=True),
        _one_prompt("prompt2k", 2048, 4, 2304, ("llama-q4_0",)),
        _one_prompt("prompt8k", 8000, 2, 8192, ("llama-q4_0",)),
        _llama_1b(1),
        _llama_1b(16),
    )
}


def warmup_requests() -> list[BenchRequest]:
    """Two short unmeasured requests, from a seed that no run uses."""
    return SyntheticWorkload(vocab_size=VOCAB_SIZE).requests(2, seed=2**31)


# name, unit, whether more is better
METRICS = {
    "output_tokens_per_s": ("output tok/s", True),
    "prompt_tokens_per_s": ("prompt tok/s", True),
    "ttft_p50": ("TTFT p50, ms", False),
    "ttft_p99": ("TTFT p99, ms", False),
    "tpot_p50": ("TPOT p50, ms", False),
    "tpot_p99": ("TPOT p99, ms", False),
}


def metric(summary: Summary, name: str) -> float | None:
    """One figure of a run by its name in `METRICS`."""
    if name == "output_tokens_per_s":
        return None if summary.tpot.p50 is None else summary.output_tokens_per_s  # prompts alone have no rate
    if name == "prompt_tokens_per_s":
        return summary.num_prompt_tokens / summary.duration_s
    latency, point = name.split("_")
    value = getattr(getattr(summary, latency), point)
    return None if value is None else float(value)
