"""The command line's entry: finds the command, loads only its module, makes one line of an error.

A command's module has `add_parser(subparsers)`; the namespace it parses carries `run(args) -> exit code`. Exit codes: 0
done, 1 failed, 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from ropeway._version import __version__
from ropeway.cli.ending import exit_code, one_line
from ropeway.errors import RopewayError

COMMANDS = {
    "serve": "serve a model over HTTP, OpenAI-compatible",
    "generate": "complete prompts and print or store the answers",
    "batch": "have a server answer a file of requests",
    "models": "list, fetch and locate models",
    "bench": "measure a server, or a step of the engine",
    "replay": "rebuild the schedule of a decision log, as a table or a timeline",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code. `--debug`, anywhere, shows the traceback of an error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_debugging = "--debug" in arguments
    if is_debugging:
        arguments.remove("--debug")
    try:
        args = _parser(arguments).parse_args(arguments)
        args.is_debugging = is_debugging
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left, as `head` does; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RopewayError, OSError) as error:
        if is_debugging:
            raise
        print(f"ropeway: error: {one_line(error)}", file=sys.stderr)
        return exit_code(error)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ropeway",
        description="Continuous-batching inference for open-weight language models.",
        epilog="--debug, with any command, shows the traceback of an error.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ropeway {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Only the command asked for is loaded; the others are there for --help and for errors.
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name == named:
            import_module(f"ropeway.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser
