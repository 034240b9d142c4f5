"""Exports a GGUF file for OpenVINO the documented way: dequantised to float32, then compressed by optimum-intel.

Runs in OpenVINO's environment. Arguments: GGUF file, target folder, int4 | int8. int4 comes in groups
of 64 (576-wide rows are no multiple of the usual 128).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FLAGS = {"int4": ("--weight-format", "int4", "--group-size", "64"), "int8": ("--weight-format", "int8")}


def export(source: Path, target: Path, weights: str) -> None:
    """Writes `target`, which appears only once it is whole."""
    checkpoint = target.with_name("checkpoint-float32")
    if not (checkpoint / "config.json").exists():
        partial = checkpoint.with_suffix(".part")
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(checkpoint)
    partial = target.with_suffix(".part")
    shutil.rmtree(partial, ignore_errors=True)
    command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", checkpoint]
    subprocess.run([*command, "--task", "text-generation-with-past", *FLAGS[weights], partial], check=True)
    partial.rename(target)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
