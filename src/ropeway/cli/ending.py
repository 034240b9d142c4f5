"""How a command ends that cannot go on: its exit code, and the one line that says why."""

from __future__ import annotations

from ropeway.errors import ConfigError, InvalidRequestError


def exit_code(error: Exception) -> int:
    """2 for wrong use, 1 for what failed."""
    return 2 if isinstance(error, ConfigError | InvalidRequestError) else 1


def one_line(error: Exception) -> str:
    """What an error says, on one line."""
    text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
    return " ".join(text.split()) or type(error).__name__
