"""Turns what an engine tells its scheduler, and what that chose, into decision-log records. Knows no files.

It sees requests, but keeps of them only numbers: a record has lengths and digests, never tokens, texts or names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ropeway.core.decision_bytes import DIGEST_BYTES
from ropeway.core.decision_log import (
    AbortRecord,
    AddRecord,
    CommitRecord,
    FailRecord,
    PlanRecord,
    Record,
    StopRecord,
)
from ropeway.core.params import Request
from ropeway.core.plan import SequenceEvent, StepPlan, StepResult
from ropeway.core.prefix_index import TokenHasher


@dataclass(slots=True)
class _Followed:
    """A request whose end has not come. number: in the log. first_id: of its sequences."""

    number: int
    first_id: int
    num_open: int


class DecisionRecorder:
    """Follows one engine from its first request on; called on its thread, after the scheduler.

    put: takes each record. key: of the digests of names and hashes; nobody can compare logs with different keys.
    """

    def __init__(self, put: Callable[[Record], None], key: bytes) -> None:
        self._put = put
        self._key = key
        self._followed: dict[str, _Followed] = {}
        self._num_added = 0
        self._digests: list[bytes] = []

    def digest(self, value: bytes) -> bytes:
        """A digest that tells nothing of the value without the key."""
        return hashlib.blake2b(value, digest_size=DIGEST_BYTES, key=self._key).digest()

    def note_hash(self, block_hash: bytes) -> None:
        """The scheduler asked for the hash of a block: it belongs to the call that is being made."""
        self._digests.append(self.digest(block_hash))

    def on_added(self, request: Request, first_id: int, now_s: float) -> None:
        terms, num_sequences = request.terms, request.params.n
        self._followed[request.request_id] = _Followed(self._num_added, first_id, num_sequences)
        self._num_added += 1
        self._put(
            AddRecord(
                now_s=now_s,
                num_prompt_tokens=len(request.prompt_token_ids),
                max_tokens=request.max_tokens,
                num_sequences=num_sequences,
                may_end_early=request.may_end_early,
                tenant=self.name_digest(terms.tenant) if terms.tenant else "",
                weight=terms.weight,
                user="" if terms.user is None else self.name_digest(terms.user),
                priority=terms.priority,
                is_background=terms.is_background,
                timeout_s=terms.timeout_s,
                queue_timeout_s=terms.queue_timeout_s,
                skips_prefix_cache=request.skips_prefix_cache,
                digests=self._take_digests(),
            )
        )

    def on_aborted(self, request_id: str, events: Iterable[SequenceEvent]) -> None:
        followed = self._followed.get(request_id)
        if followed is not None:
            self._put(AbortRecord(followed.number))
            self._settle(events)

    def on_stopped(self, request_id: str, index: int, events: Iterable[SequenceEvent]) -> None:
        followed = self._followed.get(request_id)
        if followed is not None:
            self._put(StopRecord(followed.number, index))
            self._settle(events)

    def on_expired(self, events: Iterable[SequenceEvent]) -> None:
        """events: of `expire`, before a plan; whoever is told the time of that plan expires them too."""
        self._settle(events)

    def on_planned(self, plan: StepPlan | None, now_s: float) -> None:
        self._put(PlanRecord(now_s, plan, self._take_digests()))

    def on_committed(self, result: StepResult, events: Iterable[SequenceEvent], now_s: float) -> None:
        """events: of `commit`."""
        ended = [event for event in events if event.finish_reason is not None]
        stopped_ids = tuple([self._sequence_id(event) for event in ended if event.finish_reason == "stop"])
        self._put(CommitRecord(now_s, stopped_ids, result.failed_sequence_ids, self._take_digests()))
        self._settle(ended)

    def on_failed(self, events: Iterable[SequenceEvent], now_s: float) -> None:
        """events: of `fail`."""
        self._put(FailRecord(now_s))
        self._settle(events)

    def name_digest(self, name: str) -> str:
        """What stands for a tenant or a user in the log."""
        return self.digest(name.encode("utf-8", "surrogatepass")).hex()

    def _sequence_id(self, event: SequenceEvent) -> int:
        return self._followed[event.request_id].first_id + event.index

    def _take_digests(self) -> tuple[bytes, ...]:
        digests, self._digests = self._digests, []
        return tuple(digests)

    def _settle(self, events: Iterable[SequenceEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                followed = self._followed[event.request_id]
                followed.num_open -= 1
                if not followed.num_open:
                    del self._followed[event.request_id]


class RecordingHasher:
    """Hashes tokens, and notes every hash it gives out."""

    def __init__(self, block_size: int, note: Callable[[bytes], None]) -> None:
        self._hasher = TokenHasher(block_size)
        self._note = note

    def prompt_hashes(self, request: Request) -> list[bytes]:
        hashes = self._hasher.prompt_hashes(request)
        for block_hash in hashes:
            self._note(block_hash)
        return hashes

    def next_hash(self, request: Request, parent: bytes | None, token_ids: Sequence[int]) -> bytes:
        block_hash = self._hasher.next_hash(request, parent, token_ids)
        self._note(block_hash)
        return block_hash
