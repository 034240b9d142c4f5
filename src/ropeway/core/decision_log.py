"""The decision log: what a scheduler was told and what it chose, as bytes. Knows no files, clocks or scheduling.

A log is the magic, the version, a header, and records; a record is one byte of kind, the length of its body, the body.
Times are 64-bit floats, because a replay must get the very same ones. A plan is written as its difference to the plan
before it: of a decoding sequence that goes on nothing is written at all. Token values never appear; of blocks, tenants
and users only keyed digests.

A log that was cut off can be read up to the cut; one damaged elsewhere raises DecisionLogError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from ropeway.core.decision_bytes import ByteReader, ByteWriter, OutOfDataError, framed
from ropeway.core.plan import BlockCopies, BlockGrants, LayerSlice, StepPlan
from ropeway.errors import DecisionLogError

MAGIC = b"ropeway-decisions\n"
VERSION = 4

HeaderValue = str | int | float | bool | None

_HEADER_KINDS = {"n": type(None), "b": bool, "i": int, "f": float, "s": str}


@dataclass(frozen=True, slots=True)
class AddRecord:
    """A request was accepted; its number is how many were before it.

    may_end_early: by a token or a text; otherwise its lengths are certain. tenant, user: keyed digests in hexadecimal,
    empty where there is none. digests: see `PlanRecord`.
    """

    now_s: float
    num_prompt_tokens: int
    max_tokens: int
    num_sequences: int
    may_end_early: bool = True
    tenant: str = ""
    weight: float = 1.0
    user: str = ""
    priority: int = 0
    is_background: bool = False
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    skips_prefix_cache: bool = False
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortRecord:
    """A request was aborted."""

    request_number: int


@dataclass(frozen=True, slots=True)
class StopRecord:
    """The text side ended a sequence of a request."""

    request_number: int
    index: int


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The scheduler was asked for a plan and made this one; None where there was nothing to do.

    digests: one of each block hash asked for during the call, in order; equal hashes have equal digests.
    """

    now_s: float
    plan: StepPlan | None
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The step in flight was computed.

    stopped_ids: sequences that ended with the token they drew, before their max_tokens. failed_ids: that drew none.
    """

    now_s: float
    stopped_ids: tuple[int, ...] = ()
    failed_ids: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class FailRecord:
    """The step in flight could not be computed."""

    now_s: float


Record = AddRecord | AbortRecord | StopRecord | PlanRecord | CommitRecord | FailRecord


@dataclass(slots=True)
class _Rows:
    """The rows of the plan written or read last: a decode in the next one is told by them alone."""

    sequence_ids: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def remember(self, plan: StepPlan) -> None:
        self.sequence_ids = plan.sequence_ids
        self.ends = tuple([start + n for start, n in zip(plan.starts, plan.num_tokens, strict=True)])


class LogEncoder:
    """Writes one log, in order: the header first."""

    def __init__(self) -> None:
        self._last = _Rows()

    def header(self, options: Mapping[str, HeaderValue]) -> bytes:
        """The start of a log: what its scheduler was made from."""
        out = ByteWriter()
        out.uint(len(options))
        for name, value in options.items():
            out.text(name)
            kind = next(kind for kind, kind_type in _HEADER_KINDS.items() if type(value) is kind_type)
            out.text(kind)
            out.text("" if value is None else repr(value) if not isinstance(value, str) else value)
        return MAGIC + VERSION.to_bytes(2, "little") + framed(out)

    def encode(self, record: Record) -> bytes:
        """One record."""
        out = ByteWriter()
        match record:
            case PlanRecord():
                kind = b"P"
                self._write_plan(out, record)
            case CommitRecord():
                kind = b"C"
                out.double(record.now_s)
                out.uints(record.stopped_ids)
                out.uints(record.failed_ids)
                out.digests(record.digests)
            case AddRecord():
                kind = b"A"
                _write_add(out, record)
            case AbortRecord():
                kind = b"X"
                out.uint(record.request_number)
            case StopRecord():
                kind = b"S"
                out.uint(record.request_number)
                out.uint(record.index)
            case FailRecord():
                kind = b"F"
                out.double(record.now_s)
        return kind + framed(out)

    def _write_plan(self, out: ByteWriter, record: PlanRecord) -> None:
        plan = record.plan
        out.double(record.now_s)
        out.digests(record.digests)
        out.uint(0 if plan is None else 1)
        if plan is None:
            return
        out.uint(plan.step_id)
        out.uints(plan.preempted_ids)
        out.uints(plan.finished_ids)
        num_rows = len(plan.sequence_ids)
        dropped = self._dropped(plan)
        num_going_on = len(self._last.sequence_ids) - len(dropped)
        out.uints(dropped)
        out.uint(num_rows - num_going_on)
        for row in range(num_going_on, num_rows):
            out.uint(plan.sequence_ids[row])
            out.uint(plan.starts[row])
            out.uint(plan.num_tokens[row] << 1 | plan.is_sampled[row])
        out.uint(len(plan.grants))
        for grants in plan.grants:
            _write_grants(out, grants)
        out.uint(len(plan.copies))
        for copies in plan.copies:
            out.uints(copies.source_ids)
            out.uints(copies.destination_ids)
        index, count = plan.layer_slice or (0, 0)
        out.uint(count)
        if count:
            out.uint(index)
        self._last.remember(plan)

    def _dropped(self, plan: StepPlan) -> list[int]:
        """Rows of the last plan, by position, that do not go on as the leading rows of this one."""
        last = self._last
        if (
            last.sequence_ids == plan.sequence_ids
            and last.ends == plan.starts
            and all(plan.is_sampled)
            and plan.total_num_tokens == plan.num_rows
        ):
            return []
        dropped, row, num_rows = [], 0, len(plan.sequence_ids)
        for position, (sequence_id, end) in enumerate(zip(last.sequence_ids, last.ends, strict=True)):
            if (
                row < num_rows
                and plan.sequence_ids[row] == sequence_id
                and plan.starts[row] == end
                and plan.num_tokens[row] == 1
                and plan.is_sampled[row]
            ):
                row += 1
            else:
                dropped.append(position)
        return dropped


@dataclass(slots=True)
class DecisionLog:
    """A log read back. `header` is there at once; reading on leaves in `cut_at` where the log was cut off.

    data: the whole log. Raises DecisionLogError where it is not a log, or one of another version.
    """

    data: bytes
    header: dict[str, HeaderValue] = field(init=False)
    cut_at: int | None = field(init=False, default=None)
    _start: int = field(init=False)

    def __post_init__(self) -> None:
        start = len(MAGIC) + 2
        if self.data[: len(MAGIC)] != MAGIC or len(self.data) < start:
            raise DecisionLogError("this is not a decision log: write one with `ropeway serve --decision-log FILE`")
        version = int.from_bytes(self.data[len(MAGIC) : start], "little")
        if version != VERSION:
            raise DecisionLogError(
                f"this decision log is of version {version} and this Ropeway reads version {VERSION}: replay it "
                "with the Ropeway that wrote it"
            )
        reader = ByteReader(self.data, start, len(self.data))
        try:
            end = reader.uint() + reader.position
            reader = ByteReader(self.data, reader.position, min(end, len(self.data)))
            self.header = dict(_read_header_item(reader) for _ in range(reader.uint()))
        except OutOfDataError:
            raise DecisionLogError("this decision log ends inside its header: there is nothing to replay") from None
        self._start = end

    def records(self) -> Iterator[Record]:
        """Every whole record, in order. Raises DecisionLogError, with the position, for one that makes no sense."""
        return (record for record, _ in self.entries())

    def entries(self) -> Iterator[tuple[Record, bytes]]:
        """Every whole record, in order, with its bytes. Raises as `records` does."""
        self.cut_at = None
        last, position, data = _Rows(), self._start, self.data
        while position < len(data):
            try:
                reader = ByteReader(data, position + 1, len(data))
                length = reader.uint()
                body, end = reader.position, reader.position + length
                if end > len(data):
                    raise OutOfDataError
            except OutOfDataError:
                self.cut_at = position
                return
            try:
                reader = ByteReader(data, body, end)
                record = _read_record(data[position : position + 1], reader, last)
                if reader.position != end:
                    raise ValueError("its length is not that of what it holds")
            except (OutOfDataError, ValueError, IndexError) as error:
                reason = str(error) or "a record ends too early"
                raise DecisionLogError(
                    f"the decision log is damaged at byte {position} ({reason}): copy it again"
                ) from error
            yield record, data[position:end]
            position = end


def _read_header_item(reader: ByteReader) -> tuple[str, HeaderValue]:
    name, kind, text = reader.text(), reader.text(), reader.text()
    values: dict[str, HeaderValue] = {"n": None, "b": text == "True", "s": text}
    if kind == "i":
        return name, int(text)
    return name, float(text) if kind == "f" else values[kind]


def _read_record(kind: bytes, reader: ByteReader, last: _Rows) -> Record:
    match kind:
        case b"P":
            return _read_plan(reader, last)
        case b"C":
            return CommitRecord(reader.double(), reader.uints(), reader.uints(), reader.digests())
        case b"A":
            return _read_add(reader)
        case b"X":
            return AbortRecord(reader.uint())
        case b"S":
            return StopRecord(reader.uint(), reader.uint())
        case b"F":
            return FailRecord(reader.double())
    raise ValueError(f"{kind!r} is no kind of record")


def _write_add(out: ByteWriter, record: AddRecord) -> None:
    out.double(record.now_s)
    out.uint(record.num_prompt_tokens)
    out.uint(record.max_tokens)
    out.uint(record.num_sequences)
    out.uint(record.may_end_early)
    out.text(record.tenant)
    out.double(record.weight)
    out.text(record.user)
    out.sint(record.priority)
    out.uint(record.is_background)
    out.maybe_double(record.timeout_s)
    out.maybe_double(record.queue_timeout_s)
    out.uint(record.skips_prefix_cache)
    out.digests(record.digests)


def _read_add(reader: ByteReader) -> AddRecord:
    return AddRecord(
        now_s=reader.double(),
        num_prompt_tokens=reader.uint(),
        max_tokens=reader.uint(),
        num_sequences=reader.uint(),
        may_end_early=bool(reader.uint()),
        tenant=reader.text(),
        weight=reader.double(),
        user=reader.text(),
        priority=reader.sint(),
        is_background=bool(reader.uint()),
        timeout_s=reader.maybe_double(),
        queue_timeout_s=reader.maybe_double(),
        skips_prefix_cache=bool(reader.uint()),
        digests=reader.digests(),
    )


def _write_grants(out: ByteWriter, grants: BlockGrants) -> None:
    """Rows that are granted any, each with its count, then the ids, each as its difference to the one before."""
    indptr = grants.indptr
    counts = [(row, indptr[row + 1] - indptr[row]) for row in range(len(indptr) - 1) if indptr[row + 1] > indptr[row]]
    out.uint(len(counts))
    for row, num_blocks in counts:
        out.uint(row)
        out.uint(num_blocks)
    before = 0
    for block_id in grants.block_ids:
        out.sint(block_id - before)
        before = block_id


def _read_grants(reader: ByteReader, num_rows: int) -> BlockGrants:
    counts = [0] * num_rows
    for _ in range(reader.uint()):
        row = reader.uint()
        counts[row] = reader.uint()
    indptr = tuple(accumulate(counts, initial=0))
    steps = [reader.sint() for _ in range(indptr[-1])]
    return BlockGrants(indptr, tuple(accumulate(steps)))


def _read_plan(reader: ByteReader, last: _Rows) -> PlanRecord:
    now_s, digests = reader.double(), reader.digests()
    if not reader.uint():
        return PlanRecord(now_s, None, digests)
    step_id, preempted_ids, finished_ids = reader.uint(), reader.uints(), reader.uints()
    dropped = set(reader.uints())
    going_on = [position for position in range(len(last.sequence_ids)) if position not in dropped]
    sequence_ids = [last.sequence_ids[position] for position in going_on]
    starts = [last.ends[position] for position in going_on]
    num_tokens, is_sampled = [1] * len(going_on), [True] * len(going_on)
    for _ in range(reader.uint()):
        sequence_ids.append(reader.uint())
        starts.append(reader.uint())
        packed = reader.uint()
        num_tokens.append(packed >> 1)
        is_sampled.append(bool(packed & 1))
    grants = tuple([_read_grants(reader, len(sequence_ids)) for _ in range(reader.uint())])
    copies = tuple([BlockCopies(reader.uints(), reader.uints()) for _ in range(reader.uint())])
    num_slices = reader.uint()
    layer_slice = LayerSlice(reader.uint(), num_slices) if num_slices else None
    plan = StepPlan(
        step_id,
        tuple(sequence_ids),
        tuple(starts),
        tuple(num_tokens),
        tuple(is_sampled),
        grants,
        preempted_ids,
        finished_ids,
        copies,
        layer_slice,
    )
    last.remember(plan)
    return PlanRecord(now_s, plan, digests)
