"""The numerics gates: the native backend on quantised weights against the same weights dequantised, in float32.

    make evidence-numerics [ARGS="--without-peer --resume benchmarks/results/numerics-….json"]

For each form of the default model (the file itself; the same weights stored again as Q4_0 and as Q8_0) and each text of
benchmarks/texts, over windows of 512 tokens: top-1 agreement, mean KL divergence and change of perplexity of the native
backend (int8 activations, f16 cache) against the reference backend (float32, float32 cache) on the same file. Beside it
llama.cpp's own divergence on that file, position by position, over its top log-probabilities with the rest of the
vocabulary lumped together. Prints each text as it is done, and saves; --resume goes on from a saved file.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.environments import DRIVERS, Environments
from harness.processes import free_port, running_server
from harness.results import markdown_table, new_document, result_path, save
from ropeway.backends.native import NativeBackend
from ropeway.backends.reference import ReferenceBackend
from ropeway.catalog import resolve_model
from ropeway.model.loading import load_model
from ropeway.model.weights import TensorType
from ropeway.text.tokenizer import Tokenizer
from support.divergence import Divergence, Float64Array, divergence, log_softmax, lumped_kl
from support.forward_batches import all_logits
from support.random_gguf import requantize_gguf

TEXTS_DIR = Path(__file__).parent / "texts"
TEXT_NAMES = ("prose", "dialogue", "code")
FORMS = ("file", "Q4_0", "Q8_0")
WINDOW_TOKENS, NUM_WINDOWS = 512, 5
NUM_PEER_LOGPROBS = 64

MIN_TOP1_AGREEMENT = 0.965
MAX_MEAN_KL = 0.006
MAX_PERPLEXITY_CHANGE = 0.006
MAX_KL_RATIO = 1.1  # to llama.cpp's


@dataclass(frozen=True, slots=True)
class Comparison:
    """One form of the model on one text. The last three are sums over the same positions; None without the peer."""

    form: str
    text: str
    native: Divergence
    native_lumped_kl: float | None
    peer_lumped_kl: float | None
    peer_num_agreeing: int | None

    @property
    def kl_ratio(self) -> float | None:
        if self.native_lumped_kl is None or self.peer_lumped_kl is None:
            return None
        return self.native_lumped_kl / self.peer_lumped_kl

    def failures(self) -> list[str]:
        """The gates that this comparison does not pass."""
        native, failed = self.native, []
        if native.top1_agreement < MIN_TOP1_AGREEMENT:
            failed.append(f"top-1 agreement {native.top1_agreement:.4f}, at least {MIN_TOP1_AGREEMENT} wanted")
        if native.mean_kl > MAX_MEAN_KL:
            failed.append(f"mean KL {native.mean_kl:.5f} nat, at most {MAX_MEAN_KL} wanted")
        if native.perplexity_change > MAX_PERPLEXITY_CHANGE:
            failed.append(f"perplexity {native.perplexity_change:+.2%}, at most {MAX_PERPLEXITY_CHANGE:+.1%} wanted")
        if self.kl_ratio is not None and self.kl_ratio > MAX_KL_RATIO:
            failed.append(f"mean KL {self.kl_ratio:.3f} of llama.cpp's, at most {MAX_KL_RATIO} wanted")
        return [f"{self.form} on {self.text}: {failure}" for failure in failed]

    @staticmethod
    def from_json(record: dict[str, Any]) -> Comparison:
        return Comparison(**{**record, "native": Divergence(**record["native"])})


class LlamaCpp:
    """llama.cpp's server on one file: log-probabilities after a prompt, one request each, extending a cached prompt."""

    def __init__(self, port: int) -> None:
        self._port = port

    def top_logprobs(self, token_ids: Sequence[int]) -> tuple[np.ndarray, Float64Array]:
        """The NUM_PEER_LOGPROBS likeliest next tokens and their log-probabilities, before any sampling."""
        request = {
            "prompt": list(token_ids),
            "n_predict": 1,
            "n_probs": NUM_PEER_LOGPROBS,
            "temperature": 0,
            "cache_prompt": True,
            "id_slot": 0,
        }
        # It closes connections that it says it keeps, so each request has its own.
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)) as connection:
            connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"llama.cpp answered {response.status}: {answer}")
        top = answer["completion_probabilities"][0]["top_logprobs"]
        return np.array([token["id"] for token in top]), np.array([token["logprob"] for token in top])


@contextmanager
def llama_cpp(environments: Environments, model_path: Path, num_threads: int) -> Iterator[LlamaCpp]:
    port = free_port()
    command = [environments.python("llama"), DRIVERS / "llama_cpp_server.py", "--model", str(model_path)]
    command += ["--port", str(port), "--slots", "1", "--context-tokens", "1024", "--threads", str(num_threads)]
    with tempfile.TemporaryDirectory() as logs, running_server(command, port, Path(logs) / "log", timeout_s=60):
        yield LlamaCpp(port)


def compare(
    form: str,
    text: str,
    windows: Sequence[Sequence[int]],
    backends: tuple[ReferenceBackend, NativeBackend],
    peer: LlamaCpp | None,
) -> Comparison:
    """Runs every window through the reference, the native backend and the peer."""
    reference, native = backends
    total = Divergence()
    native_kl = peer_kl = 0.0
    peer_agreeing = 0
    for token_ids in windows:
        expected = log_softmax(all_logits(reference, token_ids))
        actual = log_softmax(all_logits(native, token_ids))
        total += divergence(expected, actual, token_ids)
        if peer is not None:
            answers = [peer.top_logprobs(token_ids[: end + 1]) for end in range(len(token_ids))]
            ids = np.stack([answer[0] for answer in answers])
            kept = np.take_along_axis(expected, ids, axis=1)
            native_kl += lumped_kl(kept, np.take_along_axis(actual, ids, axis=1))
            peer_kl += lumped_kl(kept, np.stack([answer[1] for answer in answers]))
            peer_agreeing += int((ids[:, 0] == expected.argmax(axis=1)).sum())
    if peer is None:
        return Comparison(form, text, total, None, None, None)
    return Comparison(form, text, total, native_kl, peer_kl, peer_agreeing)


def form_path(form: str, source: Path, directory: Path) -> Path:
    """The file of one form of the model, made in `directory` unless it is there."""
    if form == "file":
        return source
    path = directory / f"{source.stem}.as-{form}.gguf"
    if not path.exists():
        partial = requantize_gguf(source, path.with_suffix(".part"), TensorType(form))
        partial.replace(path)
    return path


def text_windows(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    token_ids = tokenizer.encode((TEXTS_DIR / f"{text}.txt").read_text(encoding="utf-8"))
    windows = [token_ids[start : start + WINDOW_TOKENS] for start in range(0, len(token_ids), WINDOW_TOKENS)]
    return windows[:NUM_WINDOWS]


def run(options: argparse.Namespace, document: dict[str, Any], path: Path) -> list[Comparison]:
    source = resolve_model(options.model)
    done = [Comparison.from_json(record) for record in document["comparisons"]]
    options.directory.mkdir(parents=True, exist_ok=True)
    environments = Environments(options.peers.absolute())
    for form in options.forms:
        texts = [text for text in TEXT_NAMES if not any((c.form, c.text) == (form, text) for c in done)]
        if not texts:
            continue
        model_path = form_path(form, source, options.directory)
        model = load_model(model_path)
        tokenizer = Tokenizer.from_metadata(model.metadata)
        num_blocks = WINDOW_TOKENS // 16
        reference = ReferenceBackend(model.program, model.tensors, num_kv_blocks=num_blocks, kv_dtype="f32")
        native = NativeBackend(
            model.program, model.tensors, num_kv_blocks=num_blocks, num_threads=options.threads, isa=options.isa
        )
        for text in texts:
            start_s = time.monotonic()
            windows = text_windows(tokenizer, text)
            if options.without_peer:
                comparison = compare(form, text, windows, (reference, native), None)
            else:
                with llama_cpp(environments, model_path, options.threads) as peer:
                    comparison = compare(form, text, windows, (reference, native), peer)
            done.append(comparison)
            document["comparisons"] = [asdict(c) for c in done]
            save(path, document)
            print(f"{table([comparison])}\n  {time.monotonic() - start_s:.0f} s", flush=True)
    return done


def table(comparisons: Sequence[Comparison]) -> str:
    header = [
        "form",
        "text",
        "tokens",
        "top-1",
        "mean KL",
        "perplexity",
        "change",
        "KL / llama.cpp's",
        "llama.cpp top-1",
    ]
    rows = []
    for c in comparisons:
        native = c.native
        peer_top1 = None if c.peer_num_agreeing is None else c.peer_num_agreeing / native.num_positions
        rows.append(
            [
                c.form,
                c.text,
                str(native.num_positions),
                f"{native.top1_agreement:.2%}",
                f"{native.mean_kl:.5f}",
                f"{native.expected_perplexity:.3f}",
                f"{native.perplexity_change:+.2%}",
                "-" if c.kl_ratio is None else f"{c.kl_ratio:.3f}",
                "-" if peer_top1 is None else f"{peer_top1:.2%}",
            ]
        )
    return markdown_table(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="name or path of the model (default: smollm2)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="default: all")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of the native backend and of llama.cpp (default: 2)"
    )
    parser.add_argument(
        "--isa", default=None, help="instruction set of the native kernels (default: the best there is)"
    )
    parser.add_argument("--without-peer", action="store_true", help="leave llama.cpp out")
    parser.add_argument(
        "--peers", type=Path, default=Path(".cache/peers"), help="where the peers' environments are made"
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("build/numerics"), help="where requantised files are made"
    )
    parser.add_argument("--resume", type=Path, help="go on from this result file")
    options = parser.parse_args()
    if options.resume:
        path, document = options.resume, json.loads(options.resume.read_text())
    else:
        gates = {
            "min_top1_agreement": MIN_TOP1_AGREEMENT,
            "max_mean_kl": MAX_MEAN_KL,
            "max_perplexity_change": MAX_PERPLEXITY_CHANGE,
            "max_kl_ratio_to_llama_cpp": MAX_KL_RATIO,
        }
        model_path = resolve_model(options.model)
        shown = {
            "model_file": model_path.name,
            "model_sha256": hashlib.sha256(model_path.read_bytes()).hexdigest(),
            "num_threads": options.threads,
            "isa": options.isa or "best",
            "window_tokens": WINDOW_TOKENS,
        }
        document = {**new_document("numerics", shown), "gates": gates, "comparisons": []}
        path = result_path(document)
    comparisons = run(options, document, path)
    failures = [failure for c in comparisons for failure in c.failures()]
    print(f"\n{table(comparisons)}\n\nsaved {path}")
    print(*(f"FAILED {failure}" for failure in failures), sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
