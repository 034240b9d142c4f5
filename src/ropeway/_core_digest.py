"""Tells which source `ropeway.core` was compiled from: for its build and for tests, which refuse what is stale."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

DIGEST_FILE = "compiled_from.sha256"  # beside the compiled modules


def digest_of_core() -> str:
    """Of the modules as they are written."""
    digest = sha256()
    for path in sorted(Path(__file__).with_name("core").glob("*.py")):
        digest.update(sha256(path.name.encode()).digest() + sha256(path.read_bytes()).digest())
    return digest.hexdigest()
