"""Native backends with a planted fault, for what must find it."""

from __future__ import annotations

import numpy as np

from ropeway.backends.batch import Float32Array, ForwardBatch, Int32Array
from ropeway.backends.native import NativeBackend


class WrongInCompany(NativeBackend):
    """Where a step holds several sequences, the last logit of its last row is the next float."""

    def forward(self, batch: ForwardBatch) -> Float32Array:
        logits = super().forward(batch)
        if len(batch.kv_lens) > 1 and len(logits):
            logits[-1, -1] = np.nextafter(logits[-1, -1], np.float32(np.inf))
        return logits


class CopiesNothing(NativeBackend):
    """Shared blocks are not copied before they are written."""

    def copy_blocks(self, group: int, source_ids: Int32Array, destination_ids: Int32Array) -> None:
        pass
