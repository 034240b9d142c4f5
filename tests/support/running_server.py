"""A `ropeway serve` of its own process on a free port, for end-to-end tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import httpx

START_TIMEOUT_S = 120.0


class RunningServer:
    """Starts on `with`, is ready inside, is ended after; `url` is http://127.0.0.1:PORT."""

    def __init__(self, model: Path, *flags: str) -> None:
        keeping = () if {"--batch-dir", "--no-batches"} & set(flags) else ("--no-batches",)
        self._command = [sys.executable, "-m", "ropeway", "serve", str(model), "--port", "0", *keeping, *flags]
        self.url = ""
        self._flags = flags
        self._admin_key = self.flag("--admin-api-key") if "--admin-api-key" in flags else None

    def __enter__(self) -> RunningServer:
        self._log = tempfile.TemporaryFile("w+")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        assert self.process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, self.process.kill)
        watchdog.start()
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        finally:
            watchdog.cancel()
        return self

    def wait_ready(self) -> None:
        """Reads the greeting. Raises RuntimeError where the server ends instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(r"at (https?://[^\s\"]+)", line):
                self.url = match[1]
            if "curl" in line or line.startswith("{"):  # the end of the greeting, or all of it
                return
        raise RuntimeError(f"the server ended before it was ready:\n{self.log()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    def flag(self, name: str) -> str:
        """The value that a flag was given."""
        return self._flags[self._flags.index(name) + 1]

    def log(self) -> str:
        """What it wrote to stderr so far."""
        self._log.seek(0)
        return self._log.read()

    @property
    def admin_headers(self) -> dict[str, str]:
        """What opens every path."""
        return {} if self._admin_key is None else {"Authorization": f"Bearer {self._admin_key}"}

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(timeout_s)

    def metric(self, name: str) -> float:
        """The sum over its labels of a metric, by its name without the prefix."""
        text = httpx.get(f"{self.url}/metrics", headers=self.admin_headers).text
        values = re.findall(rf"^ropeway:{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Polls until the condition holds; fails the test where it does not in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "the condition did not come true in time"
        time.sleep(0.02)
