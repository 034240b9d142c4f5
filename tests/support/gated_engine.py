"""An engine thread on a backend that waits at a gate, for tests of what happens meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.fake_backend import FakeBackend

from ropeway.backends.batch import Float32Array, ForwardBatch
from ropeway.config import EngineConfig, ModelFacts, resolve
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.engine.async_engine import AsyncEngine
from ropeway.engine.engine import Engine
from ropeway.llm import make_engine, scheduler_recipe
from ropeway.text.tokenizer import Tokenizer

NUM_BLOCKS = 32
PROMPT = (70, 71, 72)


class GatedBackend(FakeBackend):
    """Waits at the gate in every forward pass; `failures` are raised one per pass, the gate having been passed."""

    def __init__(self) -> None:
        super().__init__(num_kv_blocks=NUM_BLOCKS, vocab_size=320, first_token_id=10)
        self.gate = threading.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.thread_names: set[str] = set()

    def forward(self, batch: ForwardBatch) -> Float32Array:
        self.thread_names.add(threading.current_thread().name)
        self.gate.wait()
        if self.failures:
            raise self.failures.pop()
        return super().forward(batch)


def engine_on(backend: FakeBackend, **options: Any) -> Engine:
    config = EngineConfig(**{"num_kv_blocks": NUM_BLOCKS, "max_num_batched_tokens": 64, "max_num_seqs": 8, **options})
    model = ModelFacts(name="fake", context_length=400, kv_bytes_per_token=4, weights_bytes=0)
    return make_engine(backend, scheduler_recipe(resolve(config, model, 1 << 40)))


def request(
    request_id: str,
    max_tokens: int = 20,
    n: int = 1,
    prompt: tuple[int, ...] = PROMPT,
    terms: ServiceTerms | None = None,
) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, n=n)
    return Request(request_id, prompt, params, max_tokens, seed=0, terms=terms or ServiceTerms())


Scenario = Callable[[AsyncEngine, GatedBackend], Awaitable[None]]


def run_with_engine(tokenizer: Tokenizer, scenario: Scenario, **options: Any) -> None:
    """Runs a scenario on a started engine; afterwards every block must be free."""

    async def main() -> None:
        backend = GatedBackend()
        engine = AsyncEngine(engine_on(backend, **options), tokenizer)
        engine.start()
        try:
            await asyncio.wait_for(scenario(engine, backend), 30)
        finally:
            backend.gate.set()
            await engine.shutdown(0.0)
        assert engine.stats.num_used_blocks == 0

    asyncio.run(main())
