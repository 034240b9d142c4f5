"""What the journal keeps, as plain data: a field is a column. Knows no SQL and no HTTP.

Times are whole seconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
OPEN_STATUSES: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One stored file. expires_s: when it is forgotten, unless a batch still reads it."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One batch. number: its place in the order of creation, given by the journal; 0 before that. endpoint: of every
    line. model: the name that the server which took it serves. metadata: JSON text. faults: JSON text, why it failed.
    expires_s: lines that are not answered by then never will be. output_lifetime_s: of the files it makes. X_s: when
    its status became X. num_lines: 0 until they are counted. num_prompt_tokens and its kin: of the answers so far.
    """

    batch_id: str
    tenant: str
    input_file_id: str
    endpoint: str
    model: str
    metadata: str
    status: BatchStatus
    created_s: int
    expires_s: int
    output_lifetime_s: int
    number: int = 0
    faults: str = "[]"
    in_progress_s: int | None = None
    finalizing_s: int | None = None
    completed_s: int | None = None
    failed_s: int | None = None
    expired_s: int | None = None
    cancelling_s: int | None = None
    cancelled_s: int | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATUSES


@dataclass(frozen=True, slots=True)
class PendingLine:
    """A line that has no answer yet: where its request lies in the input file. seed: of its random numbers, drawn
    before it was first run, so that its answer does not change when it is run again.
    """

    number: int
    custom_id: str
    start: int
    num_bytes: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAnswer:
    """What a request was answered: an HTTP status, the id of the answer, and its JSON body; and what it used."""

    status_code: int
    request_id: str
    body: bytes
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def is_success(self) -> bool:
        return self.status_code == 200


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list. after: the id that precedes it; limit: most entries."""

    after: str | None = None
    limit: int = 20
    is_ascending: bool = False

    @property
    def with_one_more(self) -> Page:
        """The same and the entry behind it, where there is one: so it shows whether others follow."""
        return replace(self, limit=self.limit + 1)
