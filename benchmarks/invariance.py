"""Random combinations of every option of the scheduler on the default model: the same logits and tokens as each request
has alone.

    make invariance [ARGS="--combinations 200 --seed 7 --resume FILE"]

Each request is first computed alone on a fresh engine, on one thread, prompt whole. Then every combination gets a
backend and an engine of its own, some of the requests in random order, and what tests/support/invariance.py can vary:
policy, admission, prefix cache, pool, preemption, chunks, pacing, n, batch-mates that end early, classes, tenants,
priorities, batch size, block size and threads. The logits of every token are compared as hashes. Exit status 1 where
one differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from harness.results import describe_commit, new_document, result_path, save
from ropeway import _native
from ropeway.backends.native import NativeBackend
from ropeway.catalog import DEFAULT_MODEL, resolve_model
from ropeway.core.params import Request
from ropeway.model.loading import Model, load_model
from support.invariance import CHOICES, Answer, Answers, Options, Trial, answers_alone, compare, make_requests

Document = dict[str, Any]

WIDE_CHOICES = CHOICES | {
    "pacing": (*CHOICES["pacing"], "waves"),
    "token_budget": (8, 16, 32, 64, 128, 4096),
    "max_num_seqs": (2, 3, 5, 8, 16),
}
NUM_REQUESTS = 32  # that combinations choose from
FEWEST_REQUESTS, MOST_REQUESTS = 8, 10  # in a combination
MAX_PROMPT_TOKENS = 120
MAX_TOKENS = 16


class Experiment:
    """The document of a run, on disk after every step of it, and what it is about."""

    def __init__(
        self, document: Document, path: Path, model: Model, backend_type: type[NativeBackend] = NativeBackend
    ) -> None:
        self._document, self._path, self._model, self._backend_type = document, path, model, backend_type
        options = document["options"]
        self._requests: list[Request] = make_requests(
            model.program.vocab_size,
            num_requests=options["num_requests"],
            max_prompt_tokens=options["max_prompt_tokens"],
            max_tokens=options["max_tokens"],
            seed=options["seed"],
        )
        self._start_s = time.monotonic()

    def run(self) -> bool:
        """Whatever the document lacks; whether no difference was found."""
        alone = self._alone()
        done = self._document.setdefault("combinations", [])
        num_wanted = self._document["options"]["num_combinations"]
        for number in range(len(done), num_wanted):
            done.append(self._combination(number, alone))
            self._sum_up(done)
            self._tell(f"{number + 1:>4} of {num_wanted}", done[-1])
        return self._document["first_difference"] is None

    def _alone(self) -> Answers:
        stored = self._document.setdefault("alone", {})
        for request in self._requests[len({name.split("/")[0] for name in stored}) :]:
            for (request_id, index), answer in answers_alone(self._model, request).items():
                stored[f"{request_id}/{index}"] = _as_stored(answer)
            save(self._path, self._document)
            print(f"alone {request.request_id}: {len(request.prompt_token_ids)} tokens", flush=True)
        return {(name.split("/")[0], int(name.split("/")[1])): _from_stored(each) for name, each in stored.items()}

    def _combination(self, number: int, alone: Answers) -> Document:
        start_s = time.monotonic()
        rng = random.Random(f"{self._document['options']['seed']}/{number}")
        options = Options(**{name: rng.choice(values) for name, values in WIDE_CHOICES.items()})  # type: ignore[arg-type]
        requests = rng.sample(self._requests, min(len(self._requests), rng.randint(FEWEST_REQUESTS, MOST_REQUESTS)))
        served = Trial(self._model, requests, options, rng, self._backend_type).run()
        num_compared, difference = compare(served, alone)
        return {
            "number": number,
            "options": asdict(options),
            "request_ids": " ".join(request.request_id for request in requests),
            "num_compared": num_compared,
            "difference": None if difference is None else asdict(difference),
            "num_steps": served.stats.num_steps,
            "num_preemptions": served.stats.num_preemptions,
            "num_prefix_hits": served.stats.num_prefix_hits,
            "num_evicted_blocks": served.stats.num_evicted_blocks,
            "num_blocks_copied": served.num_blocks_copied,
            "num_ended_early": served.stats.num_finished["abort"] + served.stats.num_timeouts,
            "wall_s": round(time.monotonic() - start_s, 2),
        }

    def _sum_up(self, done: Sequence[Document]) -> None:
        differing = [each for each in done if each["difference"] is not None]
        self._document |= {
            "num_compared": sum(each["num_compared"] for each in done),
            "num_differing_combinations": len(differing),
            "first_difference": {"number": differing[0]["number"], **differing[0]["difference"]} if differing else None,
        }
        save(self._path, self._document)

    def _tell(self, place: str, combination: Document) -> None:
        taken_s = time.monotonic() - self._start_s
        verdict = "same" if combination["difference"] is None else f"DIFFERS: {combination['difference']}"
        print(
            f"{place}: {verdict}, {combination['num_compared']} rows of logits, "
            f"{combination['num_preemptions']} preemptions, {taken_s:,.0f} s",
            flush=True,
        )


def _as_stored(answer: Answer) -> Document:
    return {
        "token_ids": " ".join(map(str, answer.token_ids)),
        "digests": " ".join(answer.digests),
        "finish_reason": answer.finish_reason,
    }


def _from_stored(stored: Document) -> Answer:
    token_ids = tuple(map(int, stored["token_ids"].split()))
    return Answer(token_ids, tuple(stored["digests"].split()), stored["finish_reason"])


def options_of(seed: int, num_combinations: int, model: str) -> Document:
    """What decides a run."""
    return {
        "model": model,
        "seed": seed,
        "num_combinations": num_combinations,
        "num_requests": NUM_REQUESTS,
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
        "max_tokens": MAX_TOKENS,
        "choices": {name: " ".join(map(str, values)) for name, values in WIDE_CHOICES.items()},
    }


def resumed(path: Path) -> Document:
    """The document so far. Exits where its bits are those of another commit."""
    document: Document = orjson.loads(path.read_bytes())
    now = describe_commit()["commit"]
    if document["commit"] != now:
        sys.exit(f"{path} is of commit {document['commit'][:8]}, and this is {now[:8]}: check that out, or start anew")
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--combinations", type=int, default=200)
    parser.add_argument("--seed", type=int, help="default: drawn, printed and recorded")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with this result file")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    if args.resume is None:
        document = new_document("invariance", options_of(seed, args.combinations, args.model))
        document["supported_isas"] = _native.supported_isas()
    else:
        document = resumed(args.resume)
    path = args.resume or args.output or result_path(document)
    print(f"seed {document['options']['seed']}, {path}", flush=True)
    is_same = Experiment(document, path, load_model(resolve_model(document["options"]["model"]))).run()
    print(f"{document['num_compared']:,} rows of logits compared in {len(document['combinations'])} combinations: "
          f"{'all the same' if is_same else document['first_difference']}; {path}")  # fmt: skip
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
