"""Servers that the end-to-end tests share, and the real `openai` client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from tests.support.running_server import RunningServer

ENGINE_FLAGS = (
    "--max-num-batched-tokens",
    "64",
    "--max-num-seqs",
    "64",
    "--num-kv-blocks",
    "512",
    "--backend",
    "reference",
)


@pytest.fixture(scope="session")
def server(tiny_model_path: Path) -> Iterator[RunningServer]:
    """The tiny random model under two names, one with a slash, with a body limit of 64 KiB."""
    names = ("--served-model-name", "tiny", "--served-model-name", "lab/tiny:1")
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, *names, "--max-body-size", "64K") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as openai:
        yield openai


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as plain:
        yield plain
