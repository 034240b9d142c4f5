"""What of the machine a process may use, by made-up /proc and cgroup directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropeway.machine_share import free_memory_bytes, usable_cpus


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16000000 kB\nMemFree: 100 kB\nMemAvailable:    8000000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    return tmp_path


def free(machine: Path) -> int:
    return free_memory_bytes(machine / "proc", machine / "cgroup")


def write_cgroup(directory: Path, names: tuple[str, str], limit: str, use: int, stat: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names[0]).write_text(limit)
    (directory / names[1]).write_text(str(use))
    (directory / "memory.stat").write_text(stat)


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_free_memory_without_cgroups(machine: Path) -> None:
    assert free(machine) == 8000000 << 10


def test_free_memory_of_the_tightest_cgroup(machine: Path) -> None:
    write_cgroup(machine / "cgroup" / "a" / "b", V2, "max\n", 5, "inactive_file 0\n")
    write_cgroup(machine / "cgroup" / "a", V2, "1000000\n", 700000, "anon 7\ninactive_file 50000\n")
    assert free(machine) == 350000


def test_free_memory_in_version_1(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("9:name=systemd:/\n4:memory:/x\n3:cpuset:/\n0::/\n")
    write_cgroup(machine / "cgroup" / "memory", V1, "2000\n", 500, "inactive_file 1\ntotal_inactive_file 100\n")
    assert free(machine) == 1600


def test_free_memory_is_never_negative(machine: Path) -> None:
    write_cgroup(machine / "cgroup", V2, "1000\n", 5000, "")
    assert free(machine) == 0


def test_free_memory_of_this_machine() -> None:
    assert free_memory_bytes() > 0


def write_quota(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / f"cpu.{name}").write_text(content)


def cpus(machine: Path, num_cpus: int = 64) -> int:
    return usable_cpus(num_cpus, machine / "proc", machine / "cgroup")


def test_every_processor_is_usable_without_a_quota(machine: Path) -> None:
    assert cpus(machine) == 64
    write_quota(machine / "cgroup" / "a" / "b", max="max 100000\n")
    assert cpus(machine) == 64


@pytest.mark.parametrize(
    ("quota", "usable"), [("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("9000000 100000", 64)]
)
def test_a_quota_bounds_the_processors(machine: Path, quota: str, usable: int) -> None:
    write_quota(machine / "cgroup", max=f"{quota}\n")
    assert cpus(machine) == usable


def test_the_tightest_quota_counts(machine: Path) -> None:
    write_quota(machine / "cgroup" / "a", max="300000 100000\n")
    write_quota(machine / "cgroup" / "a" / "b", max="800000 100000\n")
    assert cpus(machine) == 3


def test_quotas_of_version_1(machine: Path) -> None:
    (machine / "proc" / "self" / "cgroup").write_text("4:cpu,cpuacct:/x\n3:memory:/y\n0::/\n")
    write_quota(machine / "cgroup" / "cpu", cfs_quota_us="-1\n", cfs_period_us="100000\n")
    assert cpus(machine) == 64
    write_quota(machine / "cgroup" / "cpu" / "x", cfs_quota_us="400000\n", cfs_period_us="100000\n")
    assert cpus(machine) == 4


def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    assert usable_cpus(3, tmp_path, tmp_path) == 3
