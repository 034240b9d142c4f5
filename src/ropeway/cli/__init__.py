"""The `ropeway` command: thin modules that parse, call and print. Heavy imports happen inside the commands."""

from ropeway.cli.main import main

__all__ = ["main"]
