"""Flags that several commands share: the engine's. Their names are the fields of `EngineConfig`."""

from __future__ import annotations

import argparse
from dataclasses import fields

from ropeway.catalog import DEFAULT_MODEL
from ropeway.config import EngineConfig

# What stands in the environment for keys, so that no list of processes shows them.
API_KEY_VARIABLE = "ROPEWAY_API_KEY"
ADMIN_API_KEY_VARIABLE = "ROPEWAY_ADMIN_API_KEY"


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every engine flag. A flag that is not given leaves the default to `EngineConfig`."""
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--max-model-len", type=int, metavar="TOKENS", help="context of one sequence, prompt and output together, "
        "tokens; default: the model's own; less lets the KV pool hold more sequences")  # fmt: skip
    add("--max-num-seqs", type=int, metavar="N", help="most sequences running at once; default: 128; fewer bound the "
        "time per token")  # fmt: skip
    add("--max-num-batched-tokens", type=int, metavar="TOKENS", help="most tokens one step computes, however little "
        "time they take; default: 2048; steps are bounded in time by --objective")  # fmt: skip
    add("--objective", choices=("balanced", "throughput", "latency"), help="how long steps may be for the sake of "
        "prompts while others are answered: balanced (default) aims at 99 in 100 gaps between tokens within 2.3 "
        "times the usual, latency lets a step take 1.3 times its answers alone, throughput lets gaps grow")  # fmt: skip
    add("--slo-ttft-ms", type=float, metavar="MS", help="target for the time to the first token; requests that could "
        "not meet it are refused with 503; default: none")  # fmt: skip
    add("--slo-tpot-ms", type=float, metavar="MS", help="target for the time per token after the first; bounds steps "
        "and how many run; default: none")  # fmt: skip
    add("--admission", choices=("predictive", "reserve", "optimistic"), help="with what memory a request starts: as "
        "the lengths of late answers let expect (default), prompt and max_tokens, or only what it has now")  # fmt: skip
    add("--block-size", type=int, metavar="TOKENS", help="tokens per KV block; default: 16; less wastes less memory "
        "at the end of each sequence")  # fmt: skip
    pool = group.add_mutually_exclusive_group()
    pool.add_argument("--num-kv-blocks", type=int, metavar="N", help="size of the KV pool in blocks, exactly")
    pool.add_argument("--kv-cache-memory", metavar="SIZE", help="size of the KV pool, such as 512M or 2G; default: "
        "half of the free memory, at most 2G and at most what --max-num-seqs full contexts use")  # fmt: skip
    add("--batching", choices=("continuous", "static", "static-padded"), help="how sequences share steps; default: "
        "continuous; static is the baseline: a batch runs until its longest member ends, static-padded also computes "
        "the finished ones")  # fmt: skip
    add("--scheduling-policy", choices=("vtc", "fcfs", "priority", "spf"), help="who comes first; default: vtc, which "
        "serves tenants fairly, and is fcfs with one; fcfs: first come, first served; priority: lower numbers first; "
        "spf: shorter prompts first")  # fmt: skip
    add("--priority-aging-s", type=float, metavar="SECONDS", help="waiting that outweighs one step of priority; "
        "default: 60; 0 lets low numbers starve the rest")  # fmt: skip
    add("--background-share", type=float, metavar="SHARE", help="of the newly computed tokens, what background work "
        "is sure of; default: 0.05; 0 lets it starve")  # fmt: skip
    caching = group.add_mutually_exclusive_group()
    caching.add_argument("--enable-prefix-caching", action="store_true", default=None, help="prompts that begin alike "
        "share what is computed of them; the answers are the same; default: yes, with continuous batching")  # fmt: skip
    caching.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false", default=None,
        help="every prompt is computed whole")  # fmt: skip
    add("--max-num-queued-reqs", type=int, metavar="N", help="most requests that wait to begin beside those a free "
        "place is waiting for; more are refused with 503; default: no limit")  # fmt: skip
    add("--max-num-queued-tokens", type=int, metavar="TOKENS", help="most tokens that wait to begin; default: no "
        "limit")  # fmt: skip
    add("--num-threads", type=int, metavar="N", help="threads that compute; default: one per processor that "
        "this process may use, by its affinity and its cgroups' quotas")  # fmt: skip
    add("--isa", metavar="NAME", help="instruction set of the kernels, such as scalar or avx2; default: the best "
        "that this processor has; all give the same answers")  # fmt: skip
    add("--backend", choices=("native", "reference"), help="what computes; default: native; reference is numpy: "
        "slow, for checking")  # fmt: skip
    add("--chat-template", metavar="FILE", help="chat template to use instead of the model's own: a file of Jinja2, or "
        "the template itself")  # fmt: skip
    add("--decision-log", metavar="FILE", help="write every scheduling decision to this file, for `ropeway replay`: "
        "lengths and digests, no texts or tokens; default: none")  # fmt: skip
    add("--decision-log-size", metavar="SIZE", help="size before which the decision log ends, such as 64M; "
        "default: 1G; an hour of a full batch takes some megabytes")  # fmt: skip


def add_model_argument(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Adds the model, as a positional or under `flags`."""
    text = f"a name from `ropeway models list` or the path of a GGUF file; default: {DEFAULT_MODEL}"
    if flags:
        parser.add_argument(*flags, default=DEFAULT_MODEL, metavar="MODEL", help=text)
    else:
        parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=text)


def engine_options(args: argparse.Namespace) -> dict[str, object]:
    """The engine flags that were given, as keyword options of `LLM` and `AsyncLLM`."""
    option_names = [field.name for field in fields(EngineConfig)]
    given = {name: getattr(args, name, None) for name in option_names}
    return {name: value for name, value in given.items() if value is not None}
