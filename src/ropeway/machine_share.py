"""What of the machine this process may use: free memory and processors, as its cgroups leave them. Owns no policy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Memory this process may still take: what the kernel calls available, or what its cgroups leave, if that is
    less.
    """
    names = {2: ("memory.max", "memory.current", "inactive_file")}
    names[1] = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    left = [
        _limit_minus_use(directory, *names[version]) for version, directory in _directories("memory", proc, cgroups)
    ]
    return max(0, min([_available_bytes(proc), *[free for free in left if free is not None]]))


def usable_cpus(num_cpus: int, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Of num_cpus, as many as the quotas of this process's cgroups let it keep busy; at least 1.

    Part of a processor does not count: threads that wait for one another all wait for one that is held back.
    """
    quotas = [_num_cpus_of_quota(version, directory) for version, directory in _directories("cpu", proc, cgroups)]
    return max(1, min([num_cpus, *[int(quota) for quota in quotas if quota is not None]]))


def _directories(controller: str, proc: Path, root: Path) -> Iterator[tuple[Literal[1, 2], Path]]:
    """(version, directory) of this process's cgroup of a controller and of each one above it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version: Literal[1, 2] = 1 if controllers else 2
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        # Inside a container the path may be the host's: then only the top directory exists here.
        relative = Path(path.lstrip("/"))
        for directory in (relative, *relative.parents):
            yield version, top / directory


def _available_bytes(proc: Path) -> int:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return int(match[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limit_minus_use(directory: Path, limit_name: str, use_name: str, cache_name: str) -> int | None:
    try:
        limit = (directory / limit_name).read_text().strip()
        use = int((directory / use_name).read_text())
        statistics = (directory / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if not limit.isdigit():  # "max"
        return None
    # File pages that are not in use are given back under pressure.
    cache = re.search(rf"^{cache_name} (\d+)$", statistics, re.MULTILINE)
    return int(limit) - use + (int(cache[1]) if cache else 0)


def _num_cpus_of_quota(version: Literal[1, 2], directory: Path) -> float | None:
    """Processor time per time; None where it has no bound."""
    try:
        if version == 2:
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max", or -1
        return None
    return int(quota) / int(period)
