"""/metrics: the engine's numbers in Prometheus' text format, named as vLLM names them under `ropeway:`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ropeway.core.params import FinishReason
from ropeway.engine.async_engine import AsyncEngine
from ropeway.engine.metrics import Histogram

REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


class EngineCollector(Collector):
    """Reads an AsyncEngine when asked to. Gauges count sequences, of which a request has n."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._labels = [model_name]

    def collect(self) -> Iterable[Metric]:
        stats, metrics = self._engine.stats, self._engine.metrics
        yield self._gauge("num_requests_running", "Sequences that hold KV blocks.", stats.num_running)
        yield self._gauge(
            "num_requests_waiting", "Sequences that wait for KV blocks.", stats.num_waiting + stats.num_preempted
        )
        yield self._gauge(
            "kv_cache_usage_perc", "Share of the KV blocks that sequences hold, 0 to 1.",
            stats.num_used_blocks / stats.num_blocks,
        )  # fmt: skip
        yield self._counter("num_preemptions", "Sequences that lost their KV blocks.", stats.num_preemptions)
        yield self._counter(
            "recomputed_tokens", "Tokens computed again after a preemption.", stats.num_recomputed_tokens
        )
        yield self._counter("engine_steps", "Forward passes.", stats.num_steps)
        yield self._counter("engine_failed_steps", "Forward passes that failed.", stats.num_failed_steps)
        yield self._counter("prompt_tokens", "Prompt tokens of requests answered.", metrics.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", metrics.num_generation_tokens)
        finished = CounterMetricFamily(
            "ropeway:request_success", "Sequences ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason in REASONS:
            finished.add_metric([*self._labels, reason], metrics.finished[reason])
        yield finished
        yield self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", metrics.time_to_first_token_s
        )
        yield self._histogram(
            "inter_token_latency_seconds", "Between a sequence's tokens.", metrics.inter_token_latency_s
        )
        yield self._histogram(
            "request_queue_time_seconds", "From arrival to the first step computed.", metrics.request_queue_time_s
        )
        yield self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end of a sequence.", metrics.e2e_request_latency_s
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"ropeway:{name}", text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"ropeway:{name}", text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"ropeway:{name}", text, labels=["model_name"])
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(self._labels, buckets, histogram.total)
        return family


class Exposition:
    """The text of /metrics for one engine and this process."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model_name))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)
