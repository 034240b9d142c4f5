"""The short form of `make evidence-fuzz`: valid bodies are served, and others answered in order."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from ropeway.server.config import ServerConfig
from support.api_bodies import ENDPOINTS, valid_body
from support.asgi_client import running_app
from support.fuzz_run import run_cases
from support.fuzzing import fuzz_case
from support.random_gguf import RandomModel, write_random_gguf

NUM_VALID, NUM_CASES = 150, 500
ENGINE: dict[str, object] = {"num_kv_blocks": 512, "max_num_seqs": 64, "num_threads": 1, "served_model_name": "tiny"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", RandomModel(context_length=1024))


def test_no_body_is_answered_by_a_5xx(model: Path) -> None:
    async def run() -> None:
        config = ServerConfig(batch_dir=model.parent / "batches")
        async with running_app(model, config, **ENGINE) as client:
            rng = random.Random(0)
            taking = [endpoint for endpoint in ENDPOINTS if endpoint.base is not None]
            for number in range(NUM_VALID):
                endpoint = taking[number % len(taking)]
                body = valid_body(rng, endpoint)
                answer = await client.post(endpoint.path, json.dumps(body).encode())
                assert answer.status == (404 if endpoint.path == "/v1/batches" else 200), (
                    endpoint.path,
                    body,
                    answer.body,
                )
            verdicts = await run_cases(client, [fuzz_case(7, number) for number in range(NUM_CASES)])
        assert [verdict for verdict in verdicts if verdict.problem is not None] == []
        assert sum(verdict.status < 300 for verdict in verdicts) >= 0.2 * NUM_CASES
        assert sum(verdict.case.kind == "one field" for verdict in verdicts) >= 0.75 * NUM_CASES

    asyncio.run(run())
