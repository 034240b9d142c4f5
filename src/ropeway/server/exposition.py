"""/metrics: the engine's numbers in Prometheus' text format, named as vLLM names them under `ropeway:`."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ropeway.core.params import FinishReason
from ropeway.core.sequence import WaitingReason
from ropeway.core.stats import EngineStats, PacingStats
from ropeway.engine.metrics import Histogram
from ropeway.engine.utilization import Usage, Utilization
from ropeway.llm import AsyncLLM
from ropeway.machine_limits import MachineLimits
from ropeway.server.traffic import PHASES, Traffic

LOCK_WAIT_QUANTILES = (0.5, 0.99)
REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


class EngineCollector(Collector):
    """Reads an AsyncLLM when asked to. Gauges count sequences, of which a request has n."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._labels = [llm.facts.served_model_names[0]]

    def collect(self) -> Iterable[Metric]:
        stats, metrics = self._llm.engine.stats, self._llm.engine.metrics
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
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found there.", stats.num_prefix_hits)
        yield self._counter(
            "prefix_cache_evicted_blocks", "Cached blocks given up for other tokens.", stats.num_evicted_blocks
        )
        yield self._gauge(
            "prefix_cache_blocks", "Free KV blocks whose tokens can still be shared.", stats.num_cached_blocks
        )
        yield self._counter("engine_steps", "Forward passes.", stats.num_steps)
        yield self._counter("engine_failed_steps", "Forward passes that failed.", stats.num_failed_steps)
        yield self._counter(
            "engine_held_seconds", "For which steps were held for requests about to come.", self._llm.engine.held_s
        )
        yield self._counter("request_timeouts", "Sequences that ran into a limit of their time.", stats.num_timeouts)
        waiting = GaugeMetricFamily(
            "ropeway:waiting_reason", "Why the first in line waits: 1 for the reason.", labels=["model_name", "reason"]
        )
        for each in WaitingReason:
            waiting.add_metric([*self._labels, each.value], float(stats.waiting_reason == each.value))
        yield waiting
        yield self._counter("prompt_tokens", "Prompt tokens of requests answered.", metrics.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", metrics.num_generation_tokens)
        finished = CounterMetricFamily(
            "ropeway:request_success", "Sequences ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason in REASONS:
            finished.add_metric([*self._labels, reason], metrics.finished[reason])
        yield finished
        yield self._counter(
            "requests_refused", "Refused at the door: the queue is full, or a target could not be met.",
            metrics.num_refused,
        )  # fmt: skip
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

        if stats.pacing is not None:
            yield from self._pacing(stats.pacing)
        utilization = self._llm.engine.utilization
        if utilization is not None:
            yield from self._utilization(utilization, stats)

    def _pacing(self, pacing: PacingStats) -> Iterable[Metric]:
        yield self._counter("step_predicted_seconds", "What steps were predicted to take.", pacing.predicted_s)
        yield self._counter("step_achieved_seconds", "What those steps took.", pacing.achieved_s)
        for name, target_s, num_all, num_in in (
            ("ttft", pacing.ttft_s, pacing.num_first_tokens, pacing.num_in_ttft),
            ("tpot", pacing.tpot_s, pacing.num_answers, pacing.num_in_tpot),
        ):
            if target_s is None:
                continue
            yield self._gauge(f"slo_{name}_seconds", f"The target for {name.upper()}.", target_s)
            yield self._counter(f"slo_{name}_sequences", f"Sequences that the {name.upper()} target is for.", num_all)
            yield self._counter(f"slo_{name}_attained", "Those of them that held it.", num_in)
        yield self._gauge("is_overloaded", "1 while requests are refused at the door.", pacing.is_overloaded)
        yield self._gauge(
            "is_tpot_out_of_reach", "1 while what is running alone misses the TPOT target.", pacing.is_tpot_out_of_reach
        )

    def _utilization(self, utilization: Utilization, stats: EngineStats) -> Iterable[Metric]:
        now_s = time.monotonic()
        total, recent, limits = utilization.totals(now_s), utilization.recent(now_s), self._llm.machine_limits()
        max_num_seqs = self._llm.facts.max_num_seqs
        if max_num_seqs:
            yield self._gauge(
                "batch_occupancy_ratio", "Sequences running, of the most that may.", stats.num_running / max_num_seqs
            )
        yield self._gauge(
            "engine_busy_ratio", "Share of the recent time that went into steps.", recent.step_s / recent.now_s
        )
        yield self._gauge(
            "step_overhead_ratio", "Share of the recent steps' time outside native calls.", recent.overhead_ratio
        )
        yield self._counter("step_seconds", "Time of the engine thread while it had work.", total.step_s)
        yield self._counter("native_seconds", "The part of step_seconds inside native calls.", total.native_s)
        yield self._counter("step_sequences", "Sequences running, added up over steps.", total.num_rows)
        multiply_adds = CounterMetricFamily(
            "ropeway:multiply_adds", "Multiply-adds computed, by kind of port.", labels=["model_name", "port"]
        )
        multiply_adds.add_metric([*self._labels, "int8"], total.int8_multiply_adds)
        multiply_adds.add_metric([*self._labels, "float32"], total.f32_multiply_adds)
        yield multiply_adds
        yield self._counter("read_bytes", "Weights, keys and values read, once per pass.", total.bytes_read)
        waits = Metric(
            "ropeway:interpreter_lock_wait_seconds", "From a native call's end until it may go on.", "summary"
        )
        quantiles = utilization.lock_wait_quantiles_s(LOCK_WAIT_QUANTILES)
        labels = {"model_name": self._labels[0]}
        for share, wait_s in zip(LOCK_WAIT_QUANTILES, quantiles, strict=True):
            waits.add_sample(waits.name, {**labels, "quantile": str(share)}, wait_s)
        waits.add_sample(f"{waits.name}_count", labels, total.num_calls)
        waits.add_sample(f"{waits.name}_sum", labels, total.lock_wait_s)
        yield waits
        if limits is not None:
            yield from self._shares_of(limits, recent)

    def _shares_of(self, limits: MachineLimits, recent: Usage) -> Iterable[Metric]:
        arithmetic_s = limits.arithmetic_s(recent.int8_multiply_adds, recent.f32_multiply_adds)
        if arithmetic_s is not None and limits.int8_per_s is not None and limits.f32_per_s is not None:
            yield self._gauge(
                "arithmetic_utilization_ratio",
                "Multiply-adds of the recent time, of the most this machine was measured to do.",
                arithmetic_s / recent.now_s,
            )
            rates = GaugeMetricFamily(
                "ropeway:machine_multiply_adds_per_second", "Measured limit.", labels=["model_name", "port"]
            )
            rates.add_metric([*self._labels, "int8"], limits.int8_per_s)
            rates.add_metric([*self._labels, "float32"], limits.f32_per_s)
            yield rates
        yield self._gauge(
            "memory_bandwidth_utilization_ratio",
            "Bytes read in the recent time, of the most this machine was measured to read.",
            limits.read_s(recent.bytes_read) / recent.now_s,
        )
        yield self._gauge("machine_read_bytes_per_second", "Measured limit.", limits.read_bytes_per_s)

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


class TrafficCollector(Collector):
    """HTTP requests by method, route and status, each counted once; connections; clients that were too slow."""

    def __init__(self, traffic: Traffic, model_name: str) -> None:
        self._traffic = traffic
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        traffic = self._traffic
        requests = CounterMetricFamily(
            "ropeway:http_requests", "HTTP requests that have ended.", labels=["model_name", "method", "path", "status"]
        )
        for (method, route, status), count in sorted(traffic.num_requests.items()):
            requests.add_metric([self._model_name, method, route, str(status)], count)
        yield requests
        slow = CounterMetricFamily(
            "ropeway:slow_clients", "Clients given up, by what they were slow at.", labels=["model_name", "phase"]
        )
        for phase in PHASES:
            slow.add_metric([self._model_name, phase], traffic.slow[phase])
        yield slow
        connections = GaugeMetricFamily("ropeway:connections", "Open connections.", labels=["model_name"])
        connections.add_metric([self._model_name], traffic.num_connections)
        yield connections
        refused = CounterMetricFamily(
            "ropeway:connections_refused", "Connections beyond the most that may be open.", labels=["model_name"]
        )
        refused.add_metric([self._model_name], traffic.num_refused_connections)
        yield refused


class Exposition:
    """The text of /metrics for one engine, what goes over its sockets, and this process."""

    def __init__(self, llm: AsyncLLM, traffic: Traffic) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm))
        self._registry.register(TrafficCollector(traffic, llm.facts.served_model_names[0]))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)
