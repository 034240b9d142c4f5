"""Counts and distributions of what the engine does, as plain numbers. Knows no clock (times are passed in).

Written by one thread, the event loop's; read by anyone, who may see a step half counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from ropeway.core.params import FinishReason

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class Histogram:
    """Counts per bucket; counts[i] holds the values in (bounds[i-1], bounds[i]], the last one those above every
    bound.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass(slots=True)
class RequestTimes:
    """When things happened to one open request, in seconds of the caller's clock. last_token_s: per sequence."""

    arrival_s: float
    num_prompt_tokens: int
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: dict[int, float] = field(default_factory=dict)


class EngineMetrics:
    """Everything /metrics shows beside the engine's own counters.

    prompt_tokens counts a request's prompt when its first token comes; generation_tokens are counted through the
    match of a stop string. finished: sequences per reason. num_refused: requests that were not taken: by the engine, or
    already for the length of its queue.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.num_refused = 0
        self.time_to_first_token_s = Histogram(TTFT_BUCKETS_S)
        self.inter_token_latency_s = Histogram(ITL_BUCKETS_S)
        self.request_queue_time_s = Histogram(REQUEST_BUCKETS_S)
        self.e2e_request_latency_s = Histogram(REQUEST_BUCKETS_S)

    def on_scheduled(self, times: RequestTimes, now_s: float) -> None:
        """The request computes for the first time."""
        if times.first_scheduled_s is None:
            times.first_scheduled_s = now_s
            self.request_queue_time_s.observe(now_s - times.arrival_s)

    def on_tokens(self, times: RequestTimes, index: int, num_tokens: int, now_s: float) -> None:
        """`num_tokens` of sequence `index` came out of one step. Tokens of one step after its first have no gap of
        their own.
        """
        if num_tokens == 0:
            return
        self.num_generation_tokens += num_tokens
        last_s = times.last_token_s.get(index)
        times.last_token_s[index] = now_s
        if last_s is not None:
            self.inter_token_latency_s.observe(now_s - last_s)
        elif times.first_token_s is None:
            times.first_token_s = now_s
            self.num_prompt_tokens += times.num_prompt_tokens
            self.time_to_first_token_s.observe(now_s - times.arrival_s)

    def on_finished(self, times: RequestTimes, reason: FinishReason, now_s: float) -> None:
        """A sequence ended."""
        self.finished[reason] += 1
        self.e2e_request_latency_s.observe(now_s - times.arrival_s)
