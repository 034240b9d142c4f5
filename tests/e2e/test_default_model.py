"""The default model behind a server: its answers read as English, and do not depend on who else is served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
from tests.support.running_server import RunningServer

QUESTIONS = ("How many days are in a week?", "What is gravity?", "Write one sentence about trees.")


def test_chat_reads_as_english_alone_and_together(model_path: Path) -> None:
    with RunningServer(model_path, "--max-model-len", "512", "--num-kv-blocks", "128") as server:
        asyncio.run(ask_alone_and_together(server.url))
        assert server.metric("kv_cache_usage_perc") == 0


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
