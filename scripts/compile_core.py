"""Compiles ropeway.core with mypyc: compile_core.py OUTPUT_DIR MODULE..., run in the directory that holds the package.

The scheduler stays plain Python, read, checked and debugged as such; compiled, a step of it takes well under half the
time (docs/architecture.md). Leaves OUTPUT_DIR/ropeway/core/<module>.<abi>.so, the library that they share, and of what
they were made; what is written on the way goes to OUTPUT_DIR.work.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mypyc.build import mypycify
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

sys.path.insert(0, os.getcwd())
from ropeway._core_digest import DIGEST_FILE, digest_of_core  # noqa: E402

# A package without code; and what users hand over, which is checked by name and not by the compiler's own checks.
INTERPRETED = {"__init__", "params"}
QUICK = {"opt_level": "1", "debug_level": "0"}  # to compile: -O2 takes half as long again and its steps are no shorter


def main() -> None:
    output = Path(sys.argv[1])
    work = Path(f"{output}.work")
    paths = [Path(name).relative_to(Path.cwd()) for name in sys.argv[2:]]
    modules = sorted(str(path) for path in paths if path.stem not in INTERPRETED)
    digest = digest_of_core()  # before: what is changed meanwhile is not what is compiled
    # Not the linter's configuration: a build has nothing to do with the types of what the package's __init__ imports.
    work.mkdir(parents=True, exist_ok=True)
    configuration = work / "mypy.ini"
    configuration.write_text("[mypy]\n[mypy-ropeway]\nfollow_imports = skip\n")
    options = [f"--config-file={configuration}", f"--cache-dir={work / 'mypy'}"]
    extensions = mypycify(options + modules, group_name="ropeway.core", target_dir=str(work), **QUICK)
    for extension in extensions:
        # A newer compiler's new warning about generated code is nobody's fault and no reason to fail.
        extension.extra_compile_args = [flag for flag in extension.extra_compile_args if flag != "-Werror"]
    command = build_ext(Distribution({"name": "ropeway-core", "ext_modules": extensions}))
    command.build_lib, command.build_temp, command.parallel = str(output), str(work), os.cpu_count()
    command.ensure_finalized()
    command.run()
    (output / "ropeway" / "core" / DIGEST_FILE).write_text(digest)


if __name__ == "__main__":
    main()
