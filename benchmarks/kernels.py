"""Roofline of the gemm kernels: the machine's limits, then every kernel as a fraction of them.

Limits: multiply-add rate of the int8 and float32 ports (loops without a memory operand) and read bandwidth, on 1 and 2
threads. Every product is measured with its weights in the caches ("hot"), and up to `--cold-rows` rows also with
weights that rotate through more memory than the caches hold ("cold"), as a decoding step finds them. Its limit is the
slower of its multiply-adds at the port peak and, cold, its packed bytes at the read bandwidth. Clocks drift, so the
port peak is measured anew beside each of `--repeats` runs; the share is the median over these pairs. One pool serves
all runs of a number of threads: the threads of a fresh one may share a processor until the system moves them.

    python benchmarks/kernels.py [--forms Q4_1 Q8_0] [--rows 1 32] [--record]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass

import numpy as np

from harness.results import new_document, result_path, save
from ropeway import _native
from ropeway.model.weights import TensorType

SHAPES = {  # name -> outputs, inputs
    "qkv": (960, 576),
    "attn_out": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "8192x2048": (8192, 2048),
    "14336x4096": (14336, 4096),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FORMS = ("Q4_1", "Q4_0", "Q8_0", "F16", "F32")


@dataclass(frozen=True)
class Limits:
    """What a number of threads can do at most."""

    num_threads: int
    int8_per_s: float
    f32_per_s: float
    read_bytes_per_s: float


@dataclass(frozen=True)
class Measurement:
    """One product x[rows, k] @ w[n, k]^T; medians of the repeats.

    share: of its limit, which is `arithmetic` or `memory`. port_share: of the port peak, whatever the limit.
    """

    form: str
    shape: str
    n: int
    k: int
    rows: int
    num_threads: int
    is_cold: bool
    seconds: float
    multiply_adds_per_s: float
    weight_bytes_per_s: float
    limit: str
    share: float
    port_share: float


def measure_limits(pool: _native.ThreadPool, isa: str, cold_bytes: int, repeats: int) -> Limits:
    return Limits(
        pool.num_threads,
        max(_native.peak_int8_per_s(pool, 0.01, isa) for _ in range(4 * repeats)),
        max(_native.peak_f32_per_s(pool, 0.01, isa) for _ in range(4 * repeats)),
        max(_native.read_bytes_per_s(pool, cold_bytes, 0.05) for _ in range(repeats)),
    )


def random_weights(form: str, n: int, k: int, rng: np.random.Generator) -> _native.PackedMatrix:
    tensor_type = TensorType(form)
    if tensor_type.block_size == 1:
        kind = np.float32 if form == "F32" else np.float16
        return _native.pack(
            form, [rng.standard_normal((n, k), dtype=np.float32).astype(kind).view(np.uint8).ravel()], k
        )
    blocks = rng.integers(0, 256, (n * k // 32, tensor_type.block_bytes), dtype=np.uint8)
    header = 4 if form == "Q4_1" else 2
    blocks[:, :header] = np.full(header // 2, 0.01, np.float16).view(np.uint8)
    return _native.pack(form, [blocks.ravel()], k)


def measure(
    form: str,
    shape: str,
    w: _native.PackedMatrix,
    rows: int,
    is_cold: bool,
    pool: _native.ThreadPool,
    limits: Limits,
    options: argparse.Namespace,
) -> Measurement:
    x = np.random.default_rng(rows).standard_normal((rows, w.k), dtype=np.float32)
    copies = -(-options.cold_mib * 2**20 // w.num_bytes) if is_cold else 1
    work = rows * w.n * w.k
    num_products = max(1, int(options.slice_s * 3e10 / work), copies)
    peak = _native.peak_int8_per_s if TensorType(form).block_size > 1 else _native.peak_f32_per_s
    times, port_shares = [], []
    for _ in range(options.repeats):
        before = peak(pool, 0.002, options.isa)
        times.append(_native.time_gemm(options.isa, w, x, pool, copies, num_products))
        port_shares.append(work / times[-1] / max(before, peak(pool, 0.002, options.isa)))
    seconds, port_share = statistics.median(times), statistics.median(port_shares)
    memory_share = w.num_bytes / seconds / limits.read_bytes_per_s if is_cold else 0.0
    return Measurement(
        form,
        shape,
        w.n,
        w.k,
        rows,
        pool.num_threads,
        is_cold,
        seconds,
        work / seconds,
        w.num_bytes / seconds,
        "memory" if memory_share > port_share else "arithmetic",
        max(memory_share, port_share),
        port_share,
    )


def print_limits(limits: Limits) -> None:
    print(
        f"{limits.num_threads} thread(s): int8 {limits.int8_per_s / 1e9:.0f} G multiply-adds/s, "
        f"float32 {limits.f32_per_s / 1e9:.0f}, "
        f"read {limits.read_bytes_per_s / 1e9:.1f} GB/s"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=_native.supported_isas()[0], help="instruction set (default: the best)")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="activation rows M")
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--repeats", type=int, default=5, help="pairs of peak and product (default 5)")
    parser.add_argument(
        "--slice-s", type=float, default=0.01, help="aimed length of a measurement, seconds (default 0.01)"
    )
    parser.add_argument("--cold-rows", type=int, default=64, help="largest M measured cold too (default 64)")
    parser.add_argument("--cold-mib", type=int, default=96, help="memory to rotate weights through, MiB (default 96)")
    parser.add_argument("--record", action="store_true", help="write limits and measurements to benchmarks/results")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    pools = [_native.ThreadPool(num_threads) for num_threads in options.threads]
    all_limits = [measure_limits(pool, options.isa, options.cold_mib * 2**20, options.repeats) for pool in pools]
    for limits in all_limits:
        print_limits(limits)
    print("share of the port peak (m: of the read bandwidth, where that is more); columns: rows of activations")
    print(f"{'form':5} {'shape':11} threads weights " + " ".join(f"{rows:>5}" for rows in options.rows))
    measurements: list[Measurement] = []
    rng = np.random.default_rng(0)
    for form in options.forms:
        for shape in options.shapes:
            w = random_weights(form, *SHAPES[shape], rng)
            for pool, limits in zip(pools, all_limits, strict=True):
                for is_cold in (False, True):
                    print(f"{form:5} {shape:11} {limits.num_threads:7} {'cold' if is_cold else 'hot':7} ", end="")
                    for rows in options.rows:
                        if is_cold and rows > options.cold_rows:
                            continue
                        m = measure(form, shape, w, rows, is_cold, pool, limits, options)
                        measurements.append(m)
                        print(f"{m.share:4.2f}{'m' if m.limit == 'memory' else ' '} ", end="", flush=True)
                    print()
    if options.record:
        document = new_document("kernels", vars(options) | {"seed": 0})
        document |= {"limits": [asdict(x) for x in all_limits], "measurements": [asdict(m) for m in measurements]}
        save(result_path(document), document)
        print(result_path(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
