"""A chunk of a prompt that passes the model over several steps, a slice of the layers in each. Knows no budgets."""

from __future__ import annotations

from dataclasses import dataclass

from ropeway.core.plan import LayerSlice
from ropeway.core.sequence import Sequence


@dataclass(slots=True)
class Wave:
    """Tokens start .. start + num_tokens - 1 of a sequence, which are computed once every slice is done."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_slices: int
    num_done: int = 0  # slices that are planned

    @property
    def is_done(self) -> bool:
        return self.num_done == self.num_slices

    @property
    def is_sampled(self) -> bool:
        """Whether its next slice ends in logits that are sampled."""
        return self.next_slice.is_last and self.start + self.num_tokens == self.sequence.num_tokens

    @property
    def next_slice(self) -> LayerSlice:
        return LayerSlice(self.num_done, self.num_slices)

    def check_invariants(self) -> None:
        """Check that a wave under way is of tokens yet to be computed. Raises AssertionError."""
        assert 0 < self.num_done < self.num_slices, "a wave that is over goes on"
        assert self.start == self.sequence.num_computed_tokens, "a wave of tokens that are computed"
        assert self.start + self.num_tokens <= self.sequence.num_tokens, "a wave of tokens that are not known"
