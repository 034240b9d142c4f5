"""Starting and stopping a program under test; its memory, and the processor time it and others take. Linux only."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ContestantError(Exception):
    """A program under test did not start, died, or gave wrong answers."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(command: Sequence[str | Path], port: int, log_path: Path, timeout_s: float) -> Iterator[int]:
    """Runs a server until the block ends; yields its process id once /health answers 200."""
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
        try:
            _await_health(process, port, log_path, timeout_s)
            yield process.pid
        finally:
            process.terminate()
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_health(process: subprocess.Popen[bytes], port: int, log_path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = log_path.read_text(errors="replace")[-1500:]
            raise ContestantError(f"the server ended with status {process.returncode} before it was ready:\n{tail}")
        if _is_healthy(port):
            return
        time.sleep(0.05)
    raise ContestantError(f"the server was not ready within {timeout_s:g} s; see {log_path}")


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False  # not yet listening
    finally:
        connection.close()


def cpu_s_of(process_id: int) -> float:
    """Processor seconds of a process and its living descendants."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()
        children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S + sum(cpu_s_of(int(child)) for child in children)


def resident_bytes(process_id: int) -> int:
    fields = Path(f"/proc/{process_id}/status").read_text().split()
    return int(fields[fields.index("VmRSS:") + 1]) * 1024


def resident_parts(process_id: int) -> dict[str, int]:
    """Resident bytes by what they are mapped for: files, the C heap, and anonymous memory: Python's own arenas (1 MiB
    each), the C library's arenas of other threads, and large blocks.
    """
    parts = dict.fromkeys(("files", "heap", "anonymous", "other"), 0)
    part = "other"
    for line in Path(f"/proc/{process_id}/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            name = fields[5] if len(fields) > 5 else ""
            part = "files" if name.startswith("/") else {"": "anonymous", "[heap]": "heap"}.get(name, "other")
        elif fields[0] == "Rss:":
            parts[part] += int(fields[1]) * 1024
    return parts


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor seconds so far: of the whole machine (busy, steal included), of the contestant, of this process."""

    machine_s: float
    contestant_s: float
    harness_s: float

    @staticmethod
    def now(process_id: int) -> CpuTimes:
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]  # all but idle and iowait
        return CpuTimes(busy / _TICKS_PER_S, cpu_s_of(process_id), time.process_time())

    def others_since(self, earlier: CpuTimes) -> float:
        """Processor seconds that went to neither the contestant nor the harness: what disturbed the run."""
        machine_s = self.machine_s - earlier.machine_s
        return max(0.0, machine_s - (self.contestant_s - earlier.contestant_s) - (self.harness_s - earlier.harness_s))
