"""`ropeway models list|fetch|path`: the catalog on the command line."""

from __future__ import annotations

import argparse
from typing import Any

from ropeway.catalog import CATALOG, DEFAULT_MODEL, cached_path, fetch_model, is_cached
from ropeway.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Adds `models` and its own commands."""
    parser = subparsers.add_parser("models", help="list, fetch and locate models", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="the models that can be fetched by name, and which are in the cache")
    listing.set_defaults(run=run_list)
    for name, run, text in (
        ("fetch", run_fetch, "fetch a model into the cache, unless it is there, and print its path"),
        ("path", run_path, "print where a model's file is, or would be, in the cache"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("name", nargs="?", default=DEFAULT_MODEL, help=f"default: {DEFAULT_MODEL}")
        command.set_defaults(run=run)


def run_list(args: argparse.Namespace) -> int:
    for entry in CATALOG.values():
        state = "cached" if is_cached(entry) else "not fetched"
        size = f"{entry.size_bytes / 1e6:.0f} MB"
        default = ", the default" if entry.name == DEFAULT_MODEL else ""
        print(f"{entry.name:<12} {size:>7}  {entry.license:<12} {state:<12} {entry.description}{default}")
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    print(fetch_model(args.name))
    return 0


def run_path(args: argparse.Namespace) -> int:
    entry = CATALOG.get(args.name)
    if entry is None:
        raise ConfigError(f"no model is called {args.name!r}; known names: {', '.join(CATALOG)}")
    print(cached_path(entry))
    return 0
