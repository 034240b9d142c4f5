"""Prints what pyproject.toml asks for, one requirement a line: the build's and the package's own, and with `dev` the
extras'."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    pyproject = tomllib.loads(Path("pyproject.toml").read_text())
    requirements = pyproject["build-system"]["requires"] + ["cmake>=3.20", "ninja>=1.11"]
    requirements += pyproject["project"]["dependencies"]
    if sys.argv[1] == "dev":
        requirements += pyproject["project"]["optional-dependencies"]["dev"]
    print("\n".join(requirements))


if __name__ == "__main__":
    main()
