"""Who comes first. Knows no memory and no budgets.

A policy gives every sequence a key; smaller keys come first in admission and in prefill, and the running sequence with
the smallest is never preempted, so somebody always finishes.
"""

from __future__ import annotations

from ropeway.core.sequence import Sequence


class FirstComeFirstServed:
    """In order of arrival. A preempted sequence keeps its place."""

    def key(self, sequence: Sequence) -> int:
        return sequence.sequence_id
