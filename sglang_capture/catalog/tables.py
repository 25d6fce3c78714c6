"""The tables. Times are seconds since the epoch. Sizes are bytes: of the payload (ids, layers, last hidden
states) for captures, of the file for shards.

``totals`` holds the count, tokens and bytes of captures by state, so that a question for them costs the same at a
million captures as at none; ``database.py`` keeps it in step.
"""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, LargeBinary, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

CaptureState = Literal["pending", "spooled", "packed", "failed"]
"""``pending``: sent, nothing seen yet · ``spooled``: its dump is in the spool · ``packed``: it is a sample of a shard ·
``failed``: it has no tensors; the reason says why."""

FailureKind = Literal["refused", "failed", "unreachable", "timeout", "unreadable", "mask", "vanished"]
"""What went wrong: the plugin refused it or failed on the way · the server could not be reached · nothing appeared in
time · the dump cannot be read · its loss mask is of another length · the dump (or its shard) is gone."""

JobState = Literal["running", "done", "cancelled", "failed"]
"""``done``: every row was tried, and each has a capture or an error · ``failed``: the job itself could not go on."""

_SPOOLED = text("state = 'spooled'")

_Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite's row id is an INTEGER, and holds 64 bits


class Base(DeclarativeBase):
    """The tables of one catalog."""


class SpecRow(Base):
    """A spec as JSON, once for all captures that have its digest."""

    __tablename__ = "specs"

    digest: Mapped[str] = mapped_column(String(16), primary_key=True)
    spec: Mapped[str] = mapped_column(Text)


class CaptureRow(Base):
    """One capture; ``seq`` is the order in which they became known, and what pages are cut by."""

    __tablename__ = "captures"
    __table_args__ = (
        Index("captures_by_state", "state", "seq"),
        Index("captures_by_shard", "shard_seq"),
        # What the packer asks several times a second is answered by this index alone.
        Index(
            "captures_spooled",
            "state",
            "spec_digest",
            "seq",
            "bytes",
            "updated",
            sqlite_where=_SPOOLED,
            postgresql_where=_SPOOLED,
        ),
    )

    seq: Mapped[int] = mapped_column(_Number, primary_key=True)
    id: Mapped[str] = mapped_column(String(128), unique=True)
    state: Mapped[CaptureState] = mapped_column(String(8))
    tokens: Mapped[int | None]
    size: Mapped[int | None] = mapped_column("bytes", _Number)
    spec_digest: Mapped[str | None] = mapped_column(ForeignKey("specs.digest"))
    request_digest: Mapped[str | None] = mapped_column(String(32))
    sent: Mapped[str | None] = mapped_column(String(37))
    """What was sent, as :mod:`~sglang_capture.catalog.origin` names it; of a dump from elsewhere, what it is of."""
    mask_tokens: Mapped[int | None]
    loss_mask: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    """Packed by :func:`~sglang_capture.catalog.masks.pack_mask`; dropped once the sample's shard holds it."""
    meta: Mapped[dict[str, Any]] = mapped_column("metadata", JSON, default=dict)
    failure: Mapped[FailureKind | None] = mapped_column(String(12))
    reason: Mapped[str | None] = mapped_column(Text)
    retriable: Mapped[bool] = mapped_column(default=False)
    shard_seq: Mapped[int | None] = mapped_column(ForeignKey("shards.seq"))
    sample: Mapped[int | None]
    """Which sample of its shard it is; its rows are ``offsets[sample]:offsets[sample + 1]``."""
    created: Mapped[float]
    updated: Mapped[float]

    spec: Mapped[SpecRow | None] = relationship(lazy="raise")
    shard: Mapped[ShardRow | None] = relationship(lazy="raise")


class ShardRow(Base):
    """One shard of a dataset below the data directory."""

    __tablename__ = "shards"
    __table_args__ = (
        Index("shards_by_name", "dataset", "name", unique=True),
        Index("shards_by_dataset", "dataset", "seq"),
    )

    seq: Mapped[int] = mapped_column(_Number, primary_key=True)
    dataset: Mapped[str] = mapped_column(String(128))
    name: Mapped[str] = mapped_column(String(64))
    spec_digest: Mapped[str] = mapped_column(ForeignKey("specs.digest"))
    samples: Mapped[int]
    tokens: Mapped[int] = mapped_column(_Number)
    size: Mapped[int] = mapped_column("bytes", _Number)
    created: Mapped[float]

    spec: Mapped[SpecRow] = relationship(lazy="raise")


class JobRow(Base):
    """One JSONL being captured. All lines up to ``watermark`` are settled, and the counts are of those lines."""

    __tablename__ = "jobs"

    seq: Mapped[int] = mapped_column(_Number, primary_key=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    state: Mapped[JobState] = mapped_column(String(10))
    problem: Mapped[str] = mapped_column(Text, default="")
    source: Mapped[str] = mapped_column(Text)
    options: Mapped[dict[str, Any]] = mapped_column(JSON)
    rows: Mapped[int]
    watermark: Mapped[int] = mapped_column(default=0)
    captured: Mapped[int] = mapped_column(default=0)
    reused: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)
    tokens: Mapped[int] = mapped_column(_Number, default=0)
    created: Mapped[float]
    updated: Mapped[float]


class JobErrorRow(Base):
    """Why one line of a job has no capture."""

    __tablename__ = "job_errors"

    job_seq: Mapped[int] = mapped_column(ForeignKey("jobs.seq"), primary_key=True)
    line: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    capture_id: Mapped[str | None] = mapped_column(String(128))
    reason: Mapped[str] = mapped_column(Text)


class TotalRow(Base):
    """The captures of one state, together."""

    __tablename__ = "totals"

    state: Mapped[CaptureState] = mapped_column(String(8), primary_key=True)
    captures: Mapped[int] = mapped_column(_Number, default=0)
    tokens: Mapped[int] = mapped_column(_Number, default=0)
    size: Mapped[int] = mapped_column("bytes", _Number, default=0)


class FormatRow(Base):
    """The version of these tables, in a single row."""

    __tablename__ = "catalog_format"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
