"""What one caller's wishes cost the others, over HTTP at 32 clients: structured output, log-probabilities, n = 8.

In every round all arms run once, in random order, on one server with the default model; every arm begins with all of
its requests at once, with prompts that the prefix cache holds, and generates as many tokens of each.

plain      32 requests
schema     the same, each bound to a JSON schema that its tokens do not suffice for
logprobs   31 of them, and one that asks for 20 alternatives of every token
n8         31 of them, and one with n = 8: 39 sequences
eight      31 of them, and 8 more: as many sequences, asked for one by one

A round gives the ratios of throughput (schema to plain) and of the median TPOT of the 31 that asked for nothing
(logprobs to plain, n8 to plain, n8 to eight).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from harness.processes import free_port, running_server
from harness.raw_http import Exchange, request_bytes
from harness.results import ROOT, open_document, save, spread
from ropeway.catalog import DEFAULT_MODEL, resolve_model

ARMS = ("plain", "schema", "logprobs", "n8", "eight")
NUM_CLIENTS = 32
NUM_TOKENS = 64
NUM_PROMPT_TOKENS = 48
NUM_ROUNDS = 16
START_TIMEOUT_S = 120.0
SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
# Ratio -> (what it is, the bound of its median, whether that is the least).
CLAIMS = {
    "schema_throughput": ("tokens/s with a schema on all requests, of plain", 0.9, True),
    "logprobs_tpot": ("TPOT p50 of 31 beside one with 20 top_logprobs, of beside a plain one", 1.05, False),
    "n8_tpot": ("TPOT p50 of 31 beside one with n=8, of beside a plain one", 1.05, False),
    "n8_tpot_of_eight": ("TPOT p50 of 31 beside one with n=8, of beside 8 plain ones", 1.05, False),
}


def requests_of(arm: str) -> list[dict[str, Any]]:
    """The bodies of an arm; the first 31 are the same in all but `schema`."""
    rng = random.Random(7)
    common = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0.8}
    bodies = [
        {"prompt": [rng.randrange(1000, 20_000) for _ in range(NUM_PROMPT_TOKENS)], "seed": number, **common}
        for number in range(NUM_CLIENTS + 7)
    ]
    others, last = bodies[: NUM_CLIENTS - 1], bodies[NUM_CLIENTS - 1]
    if arm == "schema":
        return [body | {"structured_outputs": {"json": SCHEMA}} for body in [*others, last]]
    if arm == "eight":
        return bodies
    return [*others, last | {"plain": {}, "logprobs": {}, "n8": {"n": 8}}[arm]]


def as_request(arm: str, number: int, body: dict[str, Any]) -> bytes:
    """Log-probabilities of 20 alternatives are chat's to ask for; that request goes there with as many tokens."""
    if arm == "logprobs" and number == NUM_CLIENTS - 1:
        text = "Tell me of ropeways, cabins and valleys."
        wanted = {key: body[key] for key in ("max_tokens", "ignore_eos", "stream", "temperature", "seed")}
        wanted |= {"messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 20}
        return request_bytes("POST", "/v1/chat/completions", wanted)
    return request_bytes("POST", "/v1/completions", body)


async def stream(port: int, request: bytes) -> tuple[float, float, int, bytes]:
    """Times of the first and the last event with a choice, how many bytes came, and the last of them."""
    first_s = last_s = 0.0
    num_bytes, tail = 0, b""
    async with Exchange(port) as exchange:
        exchange.send(request)
        status = await exchange.head()
        if status != 200:
            raise SystemExit(f"a request was answered {status}: {(await exchange.body())[:300]!r}")
        async for chunk in exchange.chunks():
            if b'"finish_reason":' in chunk and b'"role":"assistant"' not in chunk:
                last_s = time.perf_counter()
                first_s = first_s or last_s
            num_bytes, tail = num_bytes + len(chunk), chunk
    return first_s, last_s, num_bytes, tail


async def run_arm(port: int, arm: str) -> dict[str, float]:
    """Throughput of an arm, and the median TPOT of the requests that it shares with the others."""
    bodies = requests_of(arm)
    start_s = time.perf_counter()
    answers = await asyncio.gather(*[stream(port, as_request(arm, number, body)) for number, body in enumerate(bodies)])
    if not all(tail.endswith(b"data: [DONE]\n\n") for *_, tail in answers):
        raise SystemExit(f"a stream of {arm} did not end as it should")
    end_s = max(last_s for _, last_s, *_ in answers)
    num_tokens = NUM_TOKENS * sum(body.get("n", 1) for body in bodies)
    tpots = [(last_s - first_s) / (NUM_TOKENS - 1) for first_s, last_s, *_ in answers[: NUM_CLIENTS - 1]]
    return {
        "tokens_per_s": num_tokens / (end_s - start_s),
        "tpot_p50_ms": 1000 * statistics.median(tpots),
        "duration_s": end_s - start_s,
    }


def ratios_of(round_: dict[str, Any]) -> dict[str, float]:
    tpot = {arm: round_[arm]["tpot_p50_ms"] for arm in ARMS}
    return {
        "schema_throughput": round_["schema"]["tokens_per_s"] / round_["plain"]["tokens_per_s"],
        "logprobs_tpot": tpot["logprobs"] / tpot["plain"],
        "n8_tpot": tpot["n8"] / tpot["plain"],
        "n8_tpot_of_eight": tpot["n8"] / tpot["eight"],
    }


def figures(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and range of every ratio and of every arm's figures."""
    found: dict[str, Any] = {}
    for name in CLAIMS:
        middle, least, most = spread([ratios_of(round_)[name] for round_ in rounds])
        found[name] = {"median": middle, "least": least, "most": most}
    for arm in ARMS:
        for name in ("tokens_per_s", "tpot_p50_ms"):
            found[f"{arm}_{name}"] = statistics.median(round_[arm][name] for round_ in rounds)
    return found


def show(rounds: list[dict[str, Any]]) -> bool:
    """Prints the ratios; whether every one is within its bound."""
    found, is_good = figures(rounds), True
    for name, (what, bound, is_least) in CLAIMS.items():
        ratio = found[name]
        is_met = ratio["median"] >= bound if is_least else ratio["median"] <= bound
        is_good &= is_met
        sign = "≥" if is_least else "≤"
        print(
            f"{what}: {ratio['median']:.3f} ({ratio['least']:.3f}–{ratio['most']:.3f}, {len(rounds)} pairs), "
            f"{sign} {bound:g} {'pass' if is_met else 'miss'}"
        )
    return is_good


async def run_rounds(port: int, document: dict[str, Any], path: Path, args: argparse.Namespace) -> None:
    rounds: list[dict[str, Any]] = document["rounds"]
    start_s = time.monotonic()
    for arm in ARMS:  # the prefix cache, the grammar, the pacing: nothing is new in what is measured
        await run_arm(port, arm)
    for number in range(len(rounds), args.num_rounds):
        if time.monotonic() - start_s > args.max_seconds:
            print(f"time is up: go on with --resume {path}")
            return
        order = list(ARMS)
        random.Random(number).shuffle(order)
        rounds.append({"order": order, **{arm: await run_arm(port, arm) for arm in order}})
        save(path, document | {"figures": figures(rounds)})
        shown = "  ".join(f"{name} {value:.3f}" for name, value in ratios_of(rounds[-1]).items())
        print(f"round {number + 1} of {args.num_rounds}: {shown}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="begin no round after so long")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with this result file")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    args = parser.parse_args()
    model = resolve_model(args.model)
    options = {"num_clients": NUM_CLIENTS, "num_tokens": NUM_TOKENS, "num_prompt_tokens": NUM_PROMPT_TOKENS}
    document, path = open_document(args.resume, "side-effects", options | {"model": args.model}, "rounds")
    port, log_path = free_port(), ROOT / "build" / "side-effects.log"
    log_path.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ropeway", "serve", str(model), "--port", str(port), "--no-batches"]
    with running_server(command, port, log_path, START_TIMEOUT_S):
        asyncio.run(run_rounds(port, document, path, args))
    is_good = bool(document["rounds"]) and show(document["rounds"])
    print(path)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
