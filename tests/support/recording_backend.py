"""A backend that remembers, as hashes, the logits that every token was drawn from."""

from __future__ import annotations

import hashlib

import numpy as np

from ropeway.backends.batch import Float32Array, ForwardBatch, Int32Array, SampleBatch, Samples
from ropeway.backends.native import NativeBackend

DIGEST_BYTES = 8

# Of the logits that a token was drawn from, by seed, index and position: requests are told apart by their seeds.
Place = tuple[int, int, int]
Hashes = dict[Place, bytes]


class RecordingBackend:
    """A native backend that hashes each row of logits before it is sampled.

    conflicts: places drawn from a second set of logits, as one is whose row is computed again.
    """

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend
        self.hashes: Hashes = {}
        self.conflicts: Hashes = {}
        self.num_blocks_copied = 0
        self.num_slices = 0  # of layers, that a row passed in a step of their own
        self.vocab_size, self.num_kv_blocks = backend.vocab_size, backend.num_kv_blocks
        self.block_size, self.num_layers = backend.block_size, backend.num_layers

    def copy_blocks(self, group: int, source_ids: Int32Array, destination_ids: Int32Array) -> None:
        self.num_blocks_copied += len(source_ids)
        self._backend.copy_blocks(group, source_ids, destination_ids)

    def forward(self, batch: ForwardBatch) -> Float32Array:
        self.num_slices += batch.layer_slice is not None
        return self._backend.forward(batch)

    def sample(self, logits: Float32Array, batch: SampleBatch) -> Samples:
        for row in range(len(batch.seed)):
            place = (int(batch.seed[row]), int(batch.index[row]), int(batch.position[row]))
            values = np.ascontiguousarray(logits[row if batch.logits_rows is None else batch.logits_rows[row]])
            digest = hashlib.blake2b(values, digest_size=DIGEST_BYTES).digest()
            if self.hashes.setdefault(place, digest) != digest:
                self.conflicts[place] = digest
        return self._backend.sample(logits, batch)
