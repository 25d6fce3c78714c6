"""What the routes take and give, as JSON."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from sglang_capture.catalog import CaptureRow, JobErrorRow, JobProgress, JobRow, ShardRow
from sglang_capture.catalog.tables import CaptureState, FailureKind, JobState
from sglang_capture.export.options import ExportOptions
from sglang_capture.mark import CAPTURE_ID
from sglang_capture.nesting import cut, too_deep
from sglang_capture.service.options import LayoutOptions
from sglang_capture.spec import CaptureSpec, LastHidden
from sglang_capture.spool import SpoolStatus

CaptureId = Annotated[
    str,
    Field(
        pattern=f"^{CAPTURE_ID.pattern}$",
        description="1–128 of `A–Z a–z 0–9 . _ -`, not starting with `.`",
        examples=["conv-0001"],
    ),
]

Item = TypeVar("Item")


class CaptureRequest(LayoutOptions):
    """One prompt to capture, as exactly one of `text`, `messages` and `input_ids`."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = Field(default=None, description="plain text; the engine turns it into tokens")
    messages: list[dict[str, Any]] | None = Field(
        default=None, description="a conversation; laid out with the model's chat template"
    )
    tools: list[Any] | None = Field(default=None, description="with `messages`: what the chat template is told of")
    input_ids: list[int] | None = Field(default=None, description="token ids, as the engine shall run them")
    capture_id: CaptureId | None = Field(
        default=None, description="names the capture; unset: made from the content (and from layers and last_hidden)"
    )
    layers: list[int] | None = Field(default=None, description="hidden-state indices; unset: as the server is set")
    last_hidden: LastHidden | None = Field(
        default=None, description="the last hidden state; unset: as the server is set"
    )
    loss_mask: list[int] | None = Field(
        default=None, description="0 or 1 for each of `input_ids`; `messages` get theirs from the chat template"
    )
    metadata: dict[str, Any] | None = Field(default=None, description="kept with the record and the sample")

    def row(self) -> dict[str, Any]:
        """The request as a row of a JSONL file."""
        return self.model_dump(exclude={"layers", "last_hidden", *LayoutOptions.model_fields}, exclude_none=True)


class CaptureFailure(BaseModel):
    """Why a capture has no tensors."""

    kind: FailureKind
    reason: str
    retriable: bool = Field(description="whether the same request may succeed later")


class CapturePlace(BaseModel):
    """Where a capture's tensors are: a dump in the spool, or a sample of a shard."""

    dump: str | None = Field(default=None, description="path of the `.pt` file")
    dataset: str | None = Field(default=None, description="name of the dataset below the data directory")
    shard: str | None = Field(default=None, description="file name of the shard")
    sample: int | None = Field(default=None, description="which sample of the shard it is, from 0")


class CaptureRecord(BaseModel):
    """What is known of a capture."""

    id: str
    state: CaptureState = Field(
        description="`pending`: sent · `spooled`: its dump is in the spool · `packed`: a sample of a shard · `failed`"
    )
    tokens: int | None = None
    bytes: int | None = Field(default=None, description="of the payload")
    spec_digest: str | None = Field(default=None, description="captures of equal digest may share a dataset")
    layers: list[int] | None = Field(default=None, description="hidden-state indices")
    last_hidden: LastHidden | None = None
    shapes: dict[str, list[int]] = Field(default_factory=dict, description="of the tensors, by name")
    dtype: str | None = Field(default=None, description="of the hidden states")
    place: CapturePlace | None = None
    failure: CaptureFailure | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    created: float = Field(description="seconds since the epoch")
    updated: float = Field(description="seconds since the epoch")

    @classmethod
    def of(cls, row: CaptureRow, spool_directory: str) -> CaptureRecord:
        """The record of a row that was read with its spec and shard."""
        spec = _spec(row.spec.spec) if row.spec else None
        return cls(
            id=row.id,
            state=row.state,
            tokens=row.tokens,
            bytes=row.size,
            spec_digest=row.spec_digest,
            layers=list(spec.layers) if spec else None,
            last_hidden=spec.last_hidden if spec else None,
            shapes=_shapes(spec, row.tokens) if spec and row.tokens else {},
            dtype=spec.dtype if spec else None,
            place=_place(row, spool_directory),
            failure=CaptureFailure(kind=row.failure, reason=row.reason or "", retriable=row.retriable)
            if row.failure
            else None,
            metadata=cut(row.meta) if too_deep(row.meta) else row.meta,  # one row must not cost a page
            created=row.created,
            updated=row.updated,
        )


class ShardRecord(BaseModel):
    """One shard of a dataset."""

    dataset: str
    file: str
    path: str
    samples: int
    tokens: int
    bytes: int = Field(description="size of the file")
    spec_digest: str
    layers: list[int]
    last_hidden: LastHidden
    created: float = Field(description="seconds since the epoch")

    @classmethod
    def of(cls, row: ShardRow, data_directory: str) -> ShardRecord:
        """The record of a row that was read with its spec."""
        spec = _spec(row.spec.spec)
        return cls(
            dataset=row.dataset,
            file=row.name,
            path=f"{data_directory}/{row.dataset}/{row.name}",
            samples=row.samples,
            tokens=row.tokens,
            bytes=row.size,
            spec_digest=row.spec_digest,
            layers=list(spec.layers),
            last_hidden=spec.last_hidden,
            created=row.created,
        )


class Page(BaseModel, Generic[Item]):
    """A part of a list, from the newest on."""

    items: list[Item]
    next: int | None = Field(default=None, description="pass it as `cursor` to get what follows; null at the end")


class PackRequest(BaseModel):
    """What to pack now."""

    model_config = ConfigDict(extra="forbid")

    ids: list[CaptureId] | None = Field(default=None, description="only these captures; unset: all that are spooled")
    dataset: CaptureId | None = Field(
        default=None, description="into this dataset; unset: each spec into `dataset-<digest>`"
    )


class PackAnswer(BaseModel):
    """The shards that were written."""

    shards: list[ShardRecord]
    samples: int


class JobOptions(LayoutOptions):
    """How the rows of a job are captured."""

    layers: list[int] | None = Field(default=None, description="hidden-state indices; unset: as the server is set")
    last_hidden: LastHidden | None = Field(default=None, description="unset: as the server is set")
    concurrency: int = Field(default=32, ge=1, le=1024, description="most captures in flight")


class JobRequest(JobOptions):
    """A JSONL to capture: its rows, or the path of a file on the service's machine."""

    rows: list[dict[str, Any]] | None = Field(default=None, description="the rows themselves")
    path: str | None = Field(
        default=None, description="absolute path of a JSONL file; only where the service is on loopback"
    )


class JobErrorRecord(BaseModel):
    """Why one line has no capture."""

    line: int
    capture_id: str | None
    reason: str

    @classmethod
    def of(cls, row: JobErrorRow) -> JobErrorRecord:
        return cls(line=row.line, capture_id=row.capture_id, reason=row.reason)


class JobRecord(BaseModel):
    """How far a job is."""

    id: str
    state: JobState = Field(
        description="`running` · `done`: every row has a capture or an error · `cancelled` · `failed`"
    )
    problem: str = Field(default="", description="why the job itself failed")
    waiting: str = Field(default="", description="what a running job waits for: the server, say")
    source: str
    options: JobOptions
    rows: int
    done: int = Field(description="rows that have a capture or an error")
    captured: int = Field(description="rows captured by this job")
    reused: int = Field(description="rows whose capture was there already")
    failed: int = Field(description="rows that have an error instead")
    in_flight: int = 0
    tokens: int = Field(description="of the captures")
    rows_per_second: float | None = Field(default=None, description="since the job (or the service) started")
    seconds_left: float | None = None
    errors: list[JobErrorRecord] = Field(default_factory=list, description="of the failed rows; the first 100")
    created: float = Field(description="seconds since the epoch")
    updated: float = Field(description="seconds since the epoch")

    @classmethod
    def of(cls, row: JobRow, progress: JobProgress | None = None, **live: Any) -> JobRecord:
        """The record of a row; ``progress`` and ``live`` are what only a running job knows."""
        counts = progress or JobProgress(captured=row.captured, reused=row.reused, failed=row.failed, tokens=row.tokens)
        return cls(
            id=row.id,
            state=row.state,
            problem=row.problem,
            source=row.source,
            options=JobOptions(**row.options),
            rows=row.rows,
            done=counts.captured + counts.reused + counts.failed,
            captured=counts.captured,
            reused=counts.reused,
            failed=counts.failed,
            tokens=counts.tokens,
            created=row.created,
            updated=row.updated,
            **live,
        )


class ExportRequest(ExportOptions):
    """A dataset to export for a trainer; the options are those of the command."""

    dataset: CaptureId = Field(description="name of a dataset below the data directory")
    to: str = Field(
        description="the trainer's format, as `sglang-capture export --to` takes it", examples=["specforge"]
    )
    out: str | None = Field(
        default=None,
        description="a name below `<data>/exports`, unset: `<dataset>-<to>`; an absolute path is taken where the "
        "service is on loopback",
    )
    ids: list[CaptureId] | None = Field(default=None, description="only these samples")

    @property
    def options(self) -> ExportOptions:
        return ExportOptions(**self.model_dump(include=set(ExportOptions.model_fields)))


class EngineHealth(BaseModel):
    """Whether SGLang answers."""

    url: str
    reachable: bool
    problem: str = ""


class Health(BaseModel):
    """How the service, the plugin and the engine are."""

    status: Literal["ok", "degraded"] = Field(
        description="`degraded`: the service lives; `problems` says what is wrong"
    )
    problems: list[str] = Field(description="each says what to do")
    version: str
    spool: str
    data: str
    plugin: SpoolStatus | None = Field(description="the plugin's own status, `null` if no server has run here")
    engine: EngineHealth


@lru_cache(maxsize=256)
def _spec(text: str) -> CaptureSpec:
    return CaptureSpec.from_json(text)


def _shapes(spec: CaptureSpec, tokens: int) -> dict[str, list[int]]:
    return {
        "input_ids": [tokens],
        "hidden_states": [tokens, len(spec.layers), spec.hidden_size],
        **{key: [tokens, spec.hidden_size] for key in spec.last_hidden_keys},
    }


def _place(row: CaptureRow, spool_directory: str) -> CapturePlace | None:
    if row.state == "spooled":
        return CapturePlace(dump=f"{spool_directory}/{row.id}.pt")
    if row.shard is not None:
        return CapturePlace(dataset=row.shard.dataset, shard=row.shard.name, sample=row.sample)
    return None
