"""The default model behind a server: its answers read as English, and do not depend on who else is served."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
from tests.support.running_server import RunningServer

KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2  # keys and values, layers, KV heads, head width, f16
NUM_KV_BLOCKS, BLOCK_SIZE = 128, 16
WORKING_BYTES = 200_000_000
QUESTIONS = ("How many days are in a week?", "What is gravity?", "Write one sentence about trees.")


def test_chat_reads_as_english_alone_and_together(model_path: Path) -> None:
    with RunningServer(model_path, "--max-model-len", "512", "--num-kv-blocks", str(NUM_KV_BLOCKS)) as server:
        assert resident_bytes(server) <= most_resident_bytes(model_path)
        asyncio.run(ask_alone_and_together(server.url))
        assert server.metric("kv_cache_usage_perc") == 0
        assert resident_bytes(server) <= most_resident_bytes(model_path)


def resident_bytes(server: RunningServer) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    match = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def most_resident_bytes(model_path: Path) -> int:
    """Weights, which pack to no more than their file, the KV pool, and room to work."""
    return model_path.stat().st_size + NUM_KV_BLOCKS * BLOCK_SIZE * KV_BYTES_PER_TOKEN + WORKING_BYTES


async def ask_alone_and_together(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id

        async def ask(question: str, **parameters: Any) -> str:
            messages: Any = [{"role": "user", "content": question}]
            answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=16, **parameters)
            return answer.choices[0].message.content or ""

        alone = [await ask(question, temperature=0) for question in QUESTIONS]
        seeded = [await ask(question, temperature=1, seed=3) for question in QUESTIONS]
        together = await asyncio.gather(
            *(ask(question, temperature=0) for question in QUESTIONS),
            *(ask(question, temperature=1, seed=3) for question in QUESTIONS),
        )
    assert alone + seeded == together
    assert "7 days" in alone[0]
    assert "Gravity is" in alone[1]
