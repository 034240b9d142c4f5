"""The transcript of docs/curl.md, run against a server: every command, every line of output.

In an output `…` stands for one id or time, and for nothing else.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.running_server import RunningServer

DOCUMENT = Path(__file__).parents[2] / "docs" / "curl.md"
DOCUMENTED_URL = "http://127.0.0.1:8000"
# What may be written as …: ids with their prefix, and seconds since 1970.
WILDCARD = r"(?:(?:chatcmpl-|cmpl-|msg_|resp_|rs_|call_|toolu_|fc_)?[0-9a-f]{24,32}|1[0-9]{9})"


def transcript() -> list[tuple[str, str]]:
    """(command, its output) of every console block, in order."""
    pairs = []
    for block in re.findall(r"^```console\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines(keepends=True)
            # A command ends with the line that closes its last quotation mark.
            num_lines = next(n for n in range(1, len(lines) + 1) if "".join(lines[:n]).count("'") % 2 == 0)
            pairs.append(("".join(lines[:num_lines]), "".join(lines[num_lines:])))
    return pairs


@pytest.fixture(scope="module")
def default_server(model_path: Path) -> Iterator[RunningServer]:
    with RunningServer(model_path, "--served-model-name", "smollm2", "--max-model-len", "2048") as server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_every_command_prints_what_the_document_shows(default_server: RunningServer) -> None:
    pairs = transcript()
    assert len(pairs) >= 12
    for command, expected in pairs:
        ran = subprocess.run(
            ["bash", "-ec", command.replace(DOCUMENTED_URL, default_server.url)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ran.returncode == 0, (command, ran.stderr)
        pattern = WILDCARD.join(map(re.escape, expected.strip().split("…")))
        assert re.fullmatch(pattern, ran.stdout.strip()), f"$ {command}{ran.stdout}\nis not\n{expected}"
