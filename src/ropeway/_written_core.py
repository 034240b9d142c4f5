"""Chooses between `ropeway.core` compiled, which an installation runs, and as it is written.

With ROPEWAY_INTERPRET_CORE=1 what is written runs, at less than half the speed: for debuggers, coverage, and changes
that are tried before they are built.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType

VARIABLE = "ROPEWAY_INTERPRET_CORE"


class _Finder:
    """Finds the modules of `ropeway.core` as they are written."""

    _files = FileFinder(os.path.join(os.path.dirname(__file__), "core"), (SourceFileLoader, SOURCE_SUFFIXES))

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return cls._files.find_spec(name, target) if name.startswith("ropeway.core.") else None


def is_interpreted() -> bool:
    """Whether `ropeway.core` is to run as it is written."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def choose_core() -> None:
    """Before anything of `ropeway.core` is imported."""
    if is_interpreted():
        sys.meta_path.insert(0, _Finder)
