"""lm-evaluation-harness against `/v1/completions`: its scores are the engine's own.

    make evidence-lm-eval [ARGS="--model smollm2"]

Runs `lm_eval --model local-completions` as its users do, tokenizer over HTTP included, on the three small tasks of
benchmarks/lm_eval (choices by log-likelihood, passages by rolling log-likelihood, continuations generated), against a
server of its own process. Then computes every log-likelihood offline, from the engine's prompt scores, and compares
them one by one: they must differ by nothing but the rounding of a sum. Writes dated JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.results import ROOT, new_document, result_path, save
from ropeway import LLM, SamplingParams
from ropeway.catalog import resolve_model
from support.running_server import RunningServer

TASKS = ROOT / "benchmarks" / "lm_eval"
MOST_DIFFERENCE = 1e-6


def run_harness(program: Path, url: str, model: str, folder: Path) -> dict[str, Any]:
    """Results of the three tasks, with every sample; the harness itself must end in good order."""
    options = f"model={model},base_url={url}/v1/completions,num_concurrent=8,max_length=1024,tokenizer_backend=remote"
    command = [
        program, "--model", "local-completions", "--model_args", options, "--include_path", TASKS, "--tasks",
        "ropeway_choices,ropeway_passages,ropeway_continuations", "--output_path", folder, "--log_samples",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    subprocess.run(list(map(str, command)), check=True, cwd=TASKS, env=environment)
    (results,) = folder.rglob("results_*.json")
    samples = {
        path.name.removeprefix("samples_").rsplit("_", 1)[0]: list(map(json.loads, path.read_text().splitlines()))
        for path in folder.rglob("samples_*.jsonl")
    }
    return {"results": json.loads(results.read_text())["results"], "samples": samples}


def own_loglikelihood(llm: LLM, context_ids: list[int], ids: list[int]) -> float:
    """Sum of the log-probabilities of ids after context_ids, from the scores of a prompt."""
    (output,) = llm.generate(
        {"prompt_token_ids": context_ids + ids}, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    )
    assert output.prompt_logprobs is not None
    return sum(each.logprob for each in output.prompt_logprobs[len(context_ids) :] if each is not None)


def scored_pairs(llm: LLM, samples: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, float, float]]:
    """(what was scored, the harness's log-likelihood, ours), sample by sample."""
    tokenizer = llm.tokenizer

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_bos=False)

    for sample in samples["ropeway_choices"]:
        for choice, answer in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            text = f"{sample['doc']['question']} {choice}"
            context = encoded(sample["doc"]["question"])
            yield text, float(answer[0][0]), own_loglikelihood(llm, context, encoded(text)[len(context) :])
    assert tokenizer.bos_token_id is not None
    for sample in samples["ropeway_passages"]:
        ours = own_loglikelihood(llm, [tokenizer.bos_token_id], encoded(sample["doc"]["text"]))
        yield sample["doc"]["text"], _first_number(sample["resps"]), ours


def _first_number(value: Any) -> float:
    while isinstance(value, list):
        value = value[0]
    return float(value)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs lm-evaluation-harness against a server.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lm-eval", type=Path, default=ROOT / "build" / "lm-eval" / "bin" / "lm_eval")
    args = parser.parse_args()
    program = args.lm_eval.absolute()
    packages = subprocess.run([program.parent / "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    document = new_document("lm-eval", {"model": args.model, "requirement": "lm-eval[api]==0.4.13"})
    with tempfile.TemporaryDirectory() as name:
        flags = ("--served-model-name", args.model, "--max-model-len", "1024")
        with RunningServer(resolve_model(args.model), *flags) as server:
            found = run_harness(program, server.url, args.model, Path(name))
    pairs = list(scored_pairs(LLM(args.model, max_model_len=1024), found["samples"]))
    most = max(abs(theirs - ours) for _, theirs, ours in pairs)
    document |= {
        "has_torch": any(line.startswith("torch==") for line in packages.splitlines()),
        "results": found["results"],
        "num_loglikelihoods": len(pairs),
        "most_difference_nat": most,
        "loglikelihoods": [{"text": text, "lm_eval": theirs, "engine": ours} for text, theirs, ours in pairs],
        "continuations": [
            {"prompt": each["doc"]["prompt"], "next": each["doc"]["next"], "generated": each["filtered_resps"][0]}
            for each in found["samples"]["ropeway_continuations"]
        ],
    }
    path = result_path(document)
    save(path, document)
    for task, figures in found["results"].items():
        print(task, {key: value for key, value in figures.items() if isinstance(value, float)})
    print(f"{len(pairs)} log-likelihoods, at most {most:.2e} nat from the engine's own; {path}")
    return 0 if most <= MOST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
