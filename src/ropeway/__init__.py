"""Ropeway: a continuous-batching inference engine and server for open-weight language models.

from ropeway import LLM, SamplingParams

llm = LLM("smollm2")
print(llm.generate("A ropeway is", SamplingParams(max_tokens=32))[0].outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ropeway._version import __version__
from ropeway._written_core import choose_core

choose_core()
from ropeway.core.params import SamplingParams  # noqa: E402

if TYPE_CHECKING:
    from ropeway.config import EngineConfig
    from ropeway.llm import LLM, AsyncLLM
    from ropeway.outputs import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

# Loaded on first use: numpy and the tokenizer library take longer to import than `ropeway --version` should.
_HOME_OF = {
    "LLM": "ropeway.llm",
    "AsyncLLM": "ropeway.llm",
    "CompletionOutput": "ropeway.outputs",
    "EngineConfig": "ropeway.config",
    "RequestOutput": "ropeway.outputs",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ropeway' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
