"""Imports point down only: the layers of docs/architecture.md, enforced on the syntax trees of every module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "ropeway"

# What each part may import of Ropeway, beside itself and `errors`. The longest matching prefix decides.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_version": set(),
    "_core_digest": set(),
    "_written_core": set(),
    "core": set(),
    "text": set(),
    "model": set(),
    "line_ends": set(),
    "batch": {"line_ends"},
    "backends": {"model", "_native", "machine_share"},
    "machine_limits": {"_native"},
    "machine_share": set(),
    "engine.runner": {
        "core", "backends", "_native", "engine.prompt_scores", "engine.token_lists", "engine.grammar_masks",
    },
    "engine.grammar_masks": {"backends"},
    "engine.prompt_scores": {"core", "backends", "_native"},
    "engine.token_lists": {"core", "backends", "_native"},
    "engine": {"core"},
    "inputs": {"core", "text"},
    "outputs": {"core", "text"},
    "engine.output_stream": {"outputs"},
    "engine.async_engine": {"core", "engine", "text", "outputs"},
    "catalog": set(),
    "config": {"core"},
    "calibration": {"core", "model", "backends", "config"},
    "llm": {
        "core", "text", "model", "backends", "engine", "config", "catalog", "inputs", "outputs", "calibration",
        "machine_limits", "machine_share",
    },
    "server": {
        "core", "text", "engine", "batch", "config", "llm", "catalog", "inputs", "outputs", "machine_limits",
        "line_ends", "_version",
    },
    "bench": {
        "core", "text", "engine", "config", "llm", "catalog", "backends", "model", "inputs", "outputs", "server",
        "machine_limits", "_version",
    },
    "sim": {"core", "engine"},
    "cli": {
        "core", "text", "engine", "batch", "config", "llm", "catalog", "server", "bench", "model", "backends", "inputs",
        "outputs", "sim", "_version",
    },
    "__main__": {"cli"},
    "": {"core", "config", "llm", "engine", "inputs", "outputs", "_version", "_written_core"},
}  # fmt: skip
STANDARD_LIBRARY_OF_CORE = {
    "__future__", "abc", "array", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "math", "operator", "struct", "types", "typing",
}  # fmt: skip


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix("__init__").removesuffix("."), ast.parse(path.read_text())


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import; write it out"
            assert node.module is not None
            if node.module == "ropeway":
                yield from (f"ropeway.{alias.name}" for alias in node.names)
            else:
                yield node.module


def part_of(name: str) -> str:
    """The longest prefix of a module's name that has a rule."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in MAY_IMPORT:
            return ".".join(parts[:end])
    return ""


def is_allowed(importer: str, imported: str) -> bool:
    part = part_of(importer)
    if imported == "errors" or imported.startswith("errors."):
        return True
    if part and (imported == part or imported.startswith(part + ".")) and part_of(imported) == part:
        return True
    return any(imported == top or imported.startswith(top + ".") for top in MAY_IMPORT[part])


def test_imports_point_down_only() -> None:
    found = list(modules())
    assert len(found) > 8
    faults = []
    for name, tree in found:
        for imported in imports(name, tree):
            if imported.startswith("ropeway.") and not is_allowed(name, imported.removeprefix("ropeway.")):
                faults.append(f"ropeway.{name} imports {imported}")
    assert not faults, "\n".join(faults)


def test_every_module_has_a_rule() -> None:
    for name, _ in modules():
        assert name in ("", "__init__", "__main__") or part_of(name), f"ropeway.{name} belongs to no layer"


def test_core_is_pure() -> None:
    for name, tree in modules():
        if part_of(name) == "core":
            for imported in imports(name, tree):
                top = imported.split(".")[0]
                assert top == "ropeway" or top in STANDARD_LIBRARY_OF_CORE, f"{name} imports {imported}"


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("core.scheduler", "core.plan", True),
        ("core.scheduler", "errors", True),
        ("core.scheduler", "engine.engine", False),
        ("text.tokenizer", "core.params", False),
        ("engine.engine", "text.tokenizer", False),
        ("engine.runner", "backends.batch", True),
        ("engine.engine", "backends.batch", False),
        ("engine.async_engine", "text.detokenizer", True),
        ("server.app", "llm", True),
        ("llm", "server.app", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert is_allowed(importer, imported) is allowed
