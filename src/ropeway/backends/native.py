"""The native backend: a Program lowered to phases and run by `_native`. Owns the weights' packed form and the KV pool.

Knows no scheduling, no text, no architecture: it reads the Program's ops.
"""

from __future__ import annotations

import collections
import itertools
import mmap
import os
from collections.abc import Iterable, Mapping

import numpy as np

from ropeway import _native
from ropeway.backends.batch import (
    Draws,
    Float32Array,
    ForwardRows,
    Int32Array,
    Logprobs,
    SampleRows,
    Samples,
    ScoreBatch,
)
from ropeway.backends.layer_cuts import layer_cuts
from ropeway.backends.lowering import (
    LOGITS,
    AttentionPhase,
    Bias,
    Phase,
    ProductPhase,
    Quantize,
    RopeTable,
    RowOp,
    RowsPhase,
    Turns,
    lower,
    rope_table,
    select_early,
)
from ropeway.errors import ConfigError, OutOfMemoryError, UnsupportedIsaError
from ropeway.machine_share import usable_cpus
from ropeway.model.program import Add, CacheGroup, Embed, GatedAct, KvWrite, Norm, Program, Rope, SelectRows, Weight
from ropeway.model.weights import Tensor, TensorType, dequantize

KV_VALUE_BYTES = 2  # float16
MAX_CALLS_KEPT = 64  # where nobody takes them
_QUANTISED_TYPES = frozenset({TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_1})


class NativeBackend:
    """A Program made executable by the native kernels, over a paged KV cache in float16.

    num_threads: threads that compute, the caller's among them; None is one per processor this process may use, by its
    affinity and its cgroups' quotas.
    isa: instruction set by name; None is ROPEWAY_ISA or else the best this machine has.

    Raises ConfigError (pool or threads of no use), OutOfMemoryError (the KV pool does not fit this machine) and
    UnsupportedIsaError. `forward` raises ValueError for a batch that does not fit the model or the pool.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        *,
        num_kv_blocks: int,
        block_size: int = 16,
        num_threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        if num_kv_blocks < 1 or block_size < 1 or block_size % 8:
            raise ConfigError(
                f"the KV pool needs blocks of a multiple of 8 tokens, not {num_kv_blocks} of {block_size} tokens; "
                "ask for at least one block, of size 16"
            )
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, not {num_threads}; leave it out to use every processor")
        _check_isa(isa)
        check_kv_pool(program.cache_groups, num_kv_blocks, block_size)
        self._isa = _native.selected_isa(isa)
        self._program = program
        self._num_kv_blocks = num_kv_blocks
        self._block_size = block_size
        self._pool = _thread_pool(num_threads or usable_cpus(_native.available_cpus()))
        self._executable = _native.Executable(self._pool, isa=isa, block_size=block_size, num_kv_blocks=num_kv_blocks)
        self._sampler = _native.Sampler(self._pool, program.vocab_size, isa)
        self._calls: collections.deque[tuple[float, float]] = collections.deque(maxlen=MAX_CALLS_KEPT)
        _Builder(self._executable, select_early(program), tensors).build()
        _release_file_pages(tensors.values())

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @property
    def num_kv_blocks(self) -> int:
        return self._num_kv_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_layers(self) -> int:
        return self._executable.num_layers

    @property
    def isa(self) -> str:
        """The instruction set of the kernels."""
        return self._isa

    @property
    def num_threads(self) -> int:
        return self._pool.num_threads

    @property
    def packed_bytes(self) -> int:
        """Memory of the weights as the kernels read them."""
        return self._executable.packed_bytes

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV pool once every block was used."""
        return self._executable.kv_bytes

    def copy_blocks(self, group: int, source_ids: Int32Array, destination_ids: Int32Array) -> None:
        """Copies whole blocks of a cache group, pair after pair. Raises ValueError for ids outside the pool."""
        self._executable.copy_blocks(group, source_ids, destination_ids)

    def forward(self, batch: ForwardRows) -> Float32Array:
        """logits[R, vocab] of the rows that `batch` asks for; the KV cache gains the batch's tokens."""
        logits = self._executable.forward(batch)
        self._calls.append(self._executable.last_call)
        return logits

    def sample(self, logits: Float32Array, batch: SampleRows) -> Draws:
        """One token per row of the batch; its rows of logits[R, vocab] are changed in place."""
        if isinstance(batch, _native.StepRows):
            drawn = self._sampler.draw_rows(logits, batch)
            self._calls.append(self._sampler.last_call)
            return drawn
        token_ids, is_failed, _, logprobs = self._sampler.draw(logits, batch)
        self._calls.append(self._sampler.last_call)
        return Samples(token_ids, is_failed, None if logprobs is None else Logprobs(*logprobs))

    def score(self, logits: Float32Array, batch: ScoreBatch) -> Logprobs:
        """Log-probabilities of known tokens by rows of logits[R, vocab]."""
        return Logprobs(*self._sampler.score(logits, batch))

    @property
    def work(self) -> tuple[int, int, int]:
        """Since the start: multiply-adds on the int8 ports, on the float32 ports, and bytes that had to be read.

        Products with quantised weights run on the former; products with float weights and attention on the latter.
        Weights, keys and values count once per pass.
        """
        return self._executable.work

    def take_calls(self) -> list[tuple[float, float]]:
        """Of each native call since this was asked last: seconds without the interpreter lock, then seconds from the
        end of that until the lock was had again.
        """
        calls = list(self._calls)
        self._calls.clear()
        return calls

    def set_profiling(self, is_on: bool) -> None:
        """Turns the timing of phases on or off, and clears what was measured."""
        self._executable.set_profiling(is_on)

    def profile(self) -> dict[str, tuple[int, float]]:
        """Label of a kind of phase -> (times it ran, seconds altogether), since profiling was turned on."""
        return self._executable.profile()


def check_kv_pool(groups: Iterable[CacheGroup], num_kv_blocks: int, block_size: int) -> None:
    """Raises OutOfMemoryError for a KV pool larger than this machine's memory."""
    values_per_token = sum(2 * len(group.layers) * group.num_kv_heads * _padded(group.head_dim) for group in groups)
    num_bytes = values_per_token * KV_VALUE_BYTES * block_size * num_kv_blocks
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > memory_bytes:
        raise OutOfMemoryError(
            f"a KV pool of {num_kv_blocks} blocks takes {num_bytes / 2**30:.1f} GiB, but this machine has "
            f"{memory_bytes / 2**30:.1f} GiB; ask for at most {num_kv_blocks * memory_bytes // num_bytes} blocks, "
            "less what else runs here"
        )


def _thread_pool(num_threads: int) -> _native.ThreadPool:
    try:
        return _native.ThreadPool(num_threads)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"{num_threads} threads cannot be started here ({error}); set num_threads to fewer") from None


def _padded(head_dim: int) -> int:
    return -(-head_dim // 8) * 8


def _check_isa(isa: str | None) -> None:
    name = isa if isa is not None else os.environ.get("ROPEWAY_ISA") or None
    supported = _native.supported_isas()
    if name is not None and name not in supported:
        source = "instruction set" if isa is not None else "ROPEWAY_ISA: instruction set"
        raise UnsupportedIsaError(
            f"{source} {name!r} is unknown or not had by this processor; use one of: {', '.join(supported)}"
        )


class _Builder:
    """Hands the parts and phases of a Program to an executable, each part once."""

    def __init__(self, executable: _native.Executable, program: Program, tensors: Mapping[str, Tensor]) -> None:
        self._executable = executable
        self._program = program
        self._tensors = tensors
        self._buffers: dict[str, int] = {}
        self._matrices: dict[str, int] = {}
        self._vectors: dict[str, int] = {}
        self._embeddings: dict[str, int] = {}
        self._multiplied: set[str] = set()
        self._turns: dict[RopeTable, int] = {}

    def build(self) -> None:
        widths = {**self._program.buffers, LOGITS: self._program.vocab_size}
        for name, width in widths.items():
            self._buffers[name] = self._executable.add_buffer(width)
        for group in self._program.cache_groups:
            self._executable.add_cache_group(len(group.layers), group.num_kv_heads, group.head_dim)
        quantised = {name for name, tensor in self._tensors.items() if tensor.type in _QUANTISED_TYPES}
        phases = lower(self._program, quantised)
        products = itertools.chain.from_iterable(p.products for p in phases if isinstance(p, ProductPhase))
        self._multiplied = {weight.name for weight, _ in products}
        cuts = {cut.phase: cut for cut in layer_cuts(phases, widths)}
        for i, phase in enumerate(phases):
            if i in cuts:
                self._executable.add_cut([self._buffers[name] for name in cuts[i].buffers])
            self._add_phase(phase)
        self._executable.set_logits(self._buffers[LOGITS])

    def _add_phase(self, phase: Phase) -> None:
        match phase:
            case RowsPhase():
                ops = [self._row_op(op) for op in phase.ops]
                self._executable.add_rows_phase(phase.label, phase.is_selected, ops)
            case ProductPhase():
                products = [(self._matrix(weight), self._buffers[out]) for weight, out in phase.products]
                self._executable.add_product_phase(phase.label, phase.is_selected, self._buffers[phase.x], products)
            case AttentionPhase(label, op):
                self._executable.add_attention_phase(
                    label,
                    out=self._buffers[op.out],
                    q=self._buffers[op.q],
                    group=op.group,
                    layer=self._layer(op.group, op.layer),
                    num_heads=op.num_heads,
                    scale=op.scale,
                )

    def _row_op(self, op: RowOp) -> _native.RowOp:
        buffers, make = self._buffers, _native.RowOp
        match op:
            case Quantize(x):
                return make.quantize(buffers[x])
            case GatedAct(out, gate, up, "silu"):
                return make.silu_gate(buffers[out], buffers[gate], buffers[up])
            case Add(out, a, b):
                return make.add(buffers[out], buffers[a], buffers[b])
            case SelectRows(out, x):
                return make.select_rows(buffers[out], buffers[x])
            case KvWrite(k, v, layer, group):
                return make.kv_write(buffers[k], buffers[v], self._layer(group, layer), group)
            case _:
                return self._row_op_with_weight(op)

    def _row_op_with_weight(self, op: RowOp) -> _native.RowOp:
        buffers, make = self._buffers, _native.RowOp
        match op:
            case Turns(table):
                return make.turns(self._turns_of(table))
            case Embed(out, weight):
                return make.embed(buffers[out], self._embedding(weight))
            case Norm(out, x, weight, eps):
                return make.norm(buffers[out], buffers[x], self._vector(weight), eps)
            case Bias(x, weight):
                return make.bias(buffers[x], self._vector(weight))
            case Rope():
                turns, is_interleaved = self._turns_of(rope_table(op)), op.pairing == "interleaved"
                return make.rope(buffers[op.x], turns, op.head_dim, op.rotary_dim, is_interleaved)
            case _:
                raise AssertionError(f"{op} is not an op on rows")

    def _layer(self, group: int, layer: int) -> int:
        return self._program.cache_groups[group].layers.index(layer)

    def _matrix(self, weight: Weight) -> int:
        if weight.name not in self._matrices:
            self._matrices[weight.name] = self._executable.add_matrix(*self._stored(weight))
        return self._matrices[weight.name]

    def _embedding(self, weight: Weight) -> int:
        if weight.name not in self._embeddings:
            if weight.name in self._multiplied:
                found = self._executable.add_tied_embedding(self._matrix(weight))
            else:
                found = self._executable.add_embedding(*self._stored(weight))
            self._embeddings[weight.name] = found
        return self._embeddings[weight.name]

    def _stored(self, weight: Weight) -> tuple[str, int, int, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        tensor = self._tensors[weight.name]
        n, k = tensor.shape
        return tensor.type.value, n, k, tensor.data

    def _vector(self, weight: Weight) -> int:
        if weight.name not in self._vectors:
            values = np.ascontiguousarray(dequantize(self._tensors[weight.name]))
            self._vectors[weight.name] = self._executable.add_vector(values)
        return self._vectors[weight.name]

    def _turns_of(self, table: RopeTable) -> int:
        if table not in self._turns:
            frequencies = table.base ** (-np.arange(0, table.rotary_dim, 2) / table.rotary_dim) / table.position_divisor
            if table.freq_factors is not None:
                frequencies = frequencies / dequantize(self._tensors[table.freq_factors.name])
            self._turns[table] = self._executable.add_turns(np.ascontiguousarray(frequencies, np.float64))
        return self._turns[table]


def _release_file_pages(tensors: Iterable[Tensor]) -> None:
    """Drops the mapped pages of the tensors' files from this process; what is read again comes from the page cache."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    maps = {id(found): found for tensor in tensors if (found := _file_map(tensor)) is not None}
    for found in maps.values():
        found.madvise(mmap.MADV_DONTNEED)


def _file_map(tensor: Tensor) -> mmap.mmap | None:
    base: object = tensor.data
    while True:
        match base:
            case np.ndarray():
                base = base.base
            case memoryview():
                base = base.obj
            case mmap.mmap():
                return base
            case _:
                return None
