"""The requests that lm-evaluation-harness 0.4.13's `local-completions` sends, and what it makes of the answers.

The harness itself runs in `make evidence-lm-eval`. Here its payloads are sent as it sends them (batches of token ids,
echo, one log-probability, one token, temperature 0, its seed), its arithmetic is done on the answers, and the sums are
compared with the engine's own scores of the prompt.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ropeway import SamplingParams
from support.asgi_client import AsgiClient, running_app

SEED = 1234  # its default
PAIRS = [("The capital of France is", " Paris"), ("né 🚡", " é"), ("a", "b" * 40), ("one, two,", " three, four")]


def loglikelihood_payload(prompts: list[list[int]], max_tokens: int = 1) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": SEED,
        "echo": True,
    }  # fmt: skip


async def own_scores(client: AsgiClient, token_ids: list[int]) -> list[float]:
    """Log-probability of every token of a prompt but the first, from the engine."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    async for output in client.llm.generate({"prompt_token_ids": token_ids}, params, output_kind="final"):
        assert output.prompt_logprobs is not None
        return [each.logprob for each in output.prompt_logprobs if each is not None]
    raise AssertionError("no output")


async def post(client: AsgiClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json.dumps(body).encode())
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihoods_are_the_engines_own(tiny_model_path: Path, batch_size: int) -> None:
    async def run() -> None:
        async with running_app(
            tiny_model_path, num_kv_blocks=256, max_num_seqs=8, num_threads=1, served_model_name="tiny"
        ) as client:

            async def encoded(text: str) -> list[int]:
                body = {"prompt": text, "add_special_tokens": False}
                tokens: list[int] = (await post(client, "/tokenize", body))["tokens"]
                return tokens

            prompts = [(await encoded(context), await encoded(context + rest)) for context, rest in PAIRS]
            for start in range(0, len(prompts), batch_size):
                batch = prompts[start : start + batch_size]
                answer = await post(client, "/v1/completions", loglikelihood_payload([whole for _, whole in batch]))
                choices = sorted(answer["choices"], key=lambda choice: choice["index"])
                for (context, whole), choice in zip(batch, choices, strict=True):
                    # The harness leaves out the last one, which was generated.
                    found = choice["logprobs"]["token_logprobs"][len(context) : -1]
                    own = await own_scores(client, whole)
                    assert found == own[len(context) - 1 :]
                    alternatives = choice["logprobs"]["top_logprobs"][len(context) : -1]
                    for logprob, top in zip(found, alternatives, strict=True):
                        assert max(top.values()) >= logprob
                    nothing = await post(client, "/v1/completions", loglikelihood_payload([whole], max_tokens=0))
                    assert nothing["choices"][0]["logprobs"]["token_logprobs"][1:] == own

    asyncio.run(run())


def test_generations_end_at_its_stops(tiny_model_path: Path) -> None:
    async def run() -> None:
        async with running_app(
            tiny_model_path, num_kv_blocks=256, max_num_seqs=8, num_threads=1, served_model_name="tiny"
        ) as client:
            ids = [[7, 8, 9], [10] * 20]
            body = {
                "prompt": ids, "model": "tiny", "max_tokens": 40, "temperature": 0, "stop": ["\n", "e", "<|im_end|>"],
                "seed": SEED,
            }  # fmt: skip
            answers = [await post(client, "/v1/completions", body) for _ in range(2)]
            texts = [[choice["text"] for choice in answer["choices"]] for answer in answers]
            assert texts[0] == texts[1] and len(texts[0]) == 2
            assert not any("\n" in text or "e" in text for text in texts[0])

    asyncio.run(run())
