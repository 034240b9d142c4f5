"""Environments of the peers: a virtual environment each, and the model files they need, made once and then found.

Versions are pinned, so that a figure can be had again. Knows nothing of benchmarks.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

NUM_CONTROL_TOKENS = 3  # of the random model's vocabulary, at its beginning
DRIVERS = Path(__file__).parent.parent / "peer_drivers"

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "llama": ("xllamacpp==2026.10.11549", "gguf==0.19.0"),
    "openvino": (
        "openvino-genai==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "torch==2.13.0",
        "gguf==0.19.0",
        "accelerate==1.15.0",
    ),
}
# Pulled in by optimum-intel and not needed; a build for another torch breaks the import of transformers.
UNWANTED: dict[str, tuple[str, ...]] = {"llama": (), "openvino": ("torchvision",)}


class Environments:
    """Under `root`: NAME/ for each virtual environment, and the converted models."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def python(self, name: str) -> Path:
        """The interpreter of an environment, which is set up first if it is not whole."""
        folder = self._root / name
        mark = folder / "requirements.txt"
        wanted = "\n".join(REQUIREMENTS[name]) + "\n"
        interpreter = folder / "bin" / "python"
        if not mark.exists() or mark.read_text() != wanted:
            print(f"setting up {name}: {' '.join(REQUIREMENTS[name])}", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]], check=True)
            if UNWANTED[name]:
                subprocess.run([interpreter, "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED[name]], check=True)
            mark.write_text(wanted)  # written last: an interrupted set-up starts again
        return interpreter

    def q4_0_file(self, source: Path) -> Path:
        """The Q4_0 copy of the default model."""
        target = self._root / f"{source.stem.removesuffix('.Q4_1')}.Q4_0.gguf"
        if not target.exists():
            print(f"converting {source.name} to Q4_0", file=sys.stderr)
            subprocess.run([self.python("llama"), DRIVERS / "quantize_q4_0.py", source, target], check=True)
        return target

    def llama_1b_file(self) -> Path:
        """A Llama-shaped Q4_0 file of 1.2 billion random weights, the same bytes every time; minutes to write."""
        from support.random_gguf import LLAMA_1B_MODEL, write_random_gguf  # of tests/, which the make target adds

        target = self._root / "llama-1b.Q4_0.gguf"
        if not target.exists():
            print(f"writing {target.name}", file=sys.stderr)
            # Every token but the control tokens has a text: an answer without any could not be seen to begin.
            types = np.ones(LLAMA_1B_MODEL.vocab_size, np.int32)
            types[:NUM_CONTROL_TOKENS] = 3
            model = replace(LLAMA_1B_MODEL, metadata={"tokenizer.ggml.token_type": types})
            write_random_gguf(target.with_suffix(".part"), model).rename(target)
        return target

    def openvino_model(self, source: Path, weights: str) -> Path:
        """The default model as OpenVINO exports it, `weights` int4 (groups of 64) or int8."""
        target = self._root / f"openvino-{weights}"
        if not (target / "openvino_model.xml").exists():
            print(f"exporting {source.name} for OpenVINO, {weights}", file=sys.stderr)
            command = [self.python("openvino"), DRIVERS / "openvino_export.py", source, target, weights]
            subprocess.run(command, check=True)
        return target
