"""Programs that see a processor with AVX2 and nothing wider, on one that has more. Linux on x86 with CPUID faulting."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
_CANNOT = 97  # exit status of a program under it where cpuid does not fault


class ProcessorError(Exception):
    """This machine cannot hide what its processor has."""


def avx2_environment(
    folder: Path, run: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run
) -> dict[str, str]:
    """The variables under which whatever is started sees neither AVX-512 nor AMX nor VNNI.

    Compiles what they load into `folder`. Raises: ProcessorError where the kernel or the hypervisor does not let cpuid
    fault (no `cpuid_fault` in /proc/cpuinfo).
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder.resolve() / "avx2_processor.so"
    run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    environment = {"LD_PRELOAD": str(library)}
    status = run([sys.executable, "-c", ""], env=environment).returncode
    if status == _CANNOT:
        raise ProcessorError(
            "cpuid cannot be made to fault here, which --processor avx2 needs: measure on another machine"
        )
    if status != 0:
        raise ProcessorError(f"a program under {library} ended with status {status}")
    return environment
