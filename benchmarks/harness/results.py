"""Where results go: machine, commit, every pair as JSON, and the table of median ratios. Runs nothing."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel, and how busy the machine is now."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(fields.get("flags", "").split())
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "processor": fields.get("model name", platform.processor()),
        "family_model": f"{fields.get('cpu family')}/{fields.get('model')}",
        "num_cpus": os.cpu_count(),
        "instruction_sets": sorted(flags & {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "f16c", "fma"}),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def describe_commit() -> dict[str, Any]:
    """The commit measured, and whether the working tree differs from it."""

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *args], check=True, capture_output=True, text=True).stdout.strip()

    return {"commit": git("rev-parse", "HEAD"), "is_dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


def new_document(benchmark: str, options: dict[str, Any]) -> dict[str, Any]:
    """The head of every result file."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **describe_commit(),
        "machine": describe_machine(),
        "options": options,
    }


def result_path(document: dict[str, Any]) -> Path:
    """benchmarks/results/NAME-DATE-COMMIT.json"""
    date = document["date"][:16].replace("-", "").replace(":", "").replace("T", "-")
    return RESULTS / f"{document['benchmark']}-{date}-{document['commit'][:8]}.json"


def open_document(
    resume: Path | None, benchmark: str, options: dict[str, Any], entries: str
) -> tuple[dict[str, Any], Path]:
    """The document that is resumed, or a new one with an empty list of `entries`; and where it is saved."""
    if resume is not None:
        return orjson.loads(resume.read_bytes()), resume
    document = new_document(benchmark, options) | {entries: []}
    return document, result_path(document)


def save(path: Path, document: dict[str, Any]) -> None:
    """Replaces the file in one step, so that an interrupted run leaves the last whole state to resume from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    os.replace(partial, path)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least, greatest."""
    return statistics.median(values), min(values), max(values)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table padded for reading as plain text too."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])
