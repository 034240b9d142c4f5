"""Runs a closed loop of requests through OpenVINO GenAI's continuous batching, in process.

Runs in OpenVINO's environment. Reads one JSON job on standard input, writes one JSON result to standard output: per
request its start, the arrival of each read that held tokens, and the number of tokens; the times are on one clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai


def make_pipeline(job: dict[str, Any]) -> Any:
    settings = dict(job["settings"])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = job["max_num_seqs"]
    scheduler.max_num_batched_tokens = settings.pop("max_num_batched_tokens")
    scheduler.dynamic_split_fuse = settings.pop("dynamic_split_fuse", True)
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": job["num_threads"], **settings}
    return openvino_genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)


def generation_config(max_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def run_loop(pipeline: Any, requests: list[dict[str, Any]], concurrency: int) -> list[dict[str, Any]]:
    """Keeps `concurrency` requests in flight; a finished one is replaced before the next step."""
    records: list[dict[str, Any]] = [{} for _ in requests]
    waiting = iter(range(len(requests)))
    running: dict[int, Any] = {}

    def admit() -> None:
        for index in waiting:
            request = requests[index]
            tokens = openvino.Tensor(np.array([request["prompt"]], dtype=np.int64))
            records[index] = {"start_s": time.perf_counter(), "times_s": [], "num_tokens": 0}
            running[index] = pipeline.add_request(index, tokens, generation_config(request["max_tokens"]))
            if len(running) == concurrency:
                return

    admit()
    while running:
        pipeline.step()
        now = time.perf_counter()
        for index, handle in list(running.items()):
            while handle.can_read():
                num_tokens = sum(len(output.generated_ids) for output in handle.read().values())
                if num_tokens:
                    records[index]["times_s"].append(now)
                    records[index]["num_tokens"] += num_tokens
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del running[index]
        if len(running) < concurrency:
            admit()
    return records


def machine_cpu_s() -> float:
    with open("/proc/stat") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    job = json.load(sys.stdin)
    pipeline = make_pipeline(job)
    run_loop(pipeline, job["warmup"], 2)
    machine_before_s, own_before_s, start_s = machine_cpu_s(), time.process_time(), time.perf_counter()
    records = run_loop(pipeline, job["requests"], job["concurrency"])
    result = {
        "duration_s": time.perf_counter() - start_s,
        "machine_cpu_s": machine_cpu_s() - machine_before_s,
        "own_cpu_s": time.process_time() - own_before_s,
        "records": records,
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
