"""How rows of captures are found, made and moved from state to state, inside a transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from sglang_capture.catalog.tables import CaptureRow, CaptureState, FailureKind, SpecRow
from sglang_capture.spec import CaptureSpec

_IDS_A_QUERY = 500

_Key = TypeVar("_Key")


def chunks(ids: Iterable[_Key]) -> Iterator[list[_Key]]:
    """``ids`` in lists short enough for the parameter limit of every database."""
    listed = list(ids)
    return (listed[start : start + _IDS_A_QUERY] for start in range(0, len(listed), _IDS_A_QUERY))


def find_captures(session: Session, ids: Iterable[str]) -> dict[str, CaptureRow]:
    """The captures of ``ids`` by id."""
    found: dict[str, CaptureRow] = {}
    for some in chunks(ids):
        found.update((row.id, row) for row in session.scalars(select(CaptureRow).where(CaptureRow.id.in_(some))))
    return found


def new_capture(session: Session, capture_id: str, metadata: dict[str, Any] | None = None) -> CaptureRow:
    """A record for an id that has none."""
    now = time.time()
    row = CaptureRow(id=capture_id, state="pending", meta=metadata or {}, retriable=False, created=now, updated=now)
    session.add(row)
    return row


def move(row: CaptureRow, state: CaptureState) -> None:
    """Give a record another state; what an earlier failure left is cleared."""
    row.state = state
    row.updated = time.time()
    row.failure, row.reason, row.retriable = None, None, False


def fail(row: CaptureRow, kind: FailureKind, reason: str, retriable: bool) -> None:
    """Record that a capture has no tensors, or none any more."""
    move(row, "failed")
    row.tokens = row.size = row.shard_seq = row.sample = None
    row.failure, row.reason, row.retriable = kind, reason, retriable


def disown(row: CaptureRow, sent: str) -> None:
    """Make a record that of a dump from elsewhere, known by ``sent``: nothing that was asked for here is true of it."""
    row.request_digest, row.sent = None, sent
    row.loss_mask, row.mask_tokens, row.meta = None, None, {}


def remember_spec(session: Session, spec: CaptureSpec) -> str:
    """Store ``spec`` unless one of its digest is there; returns the digest.

    It is flushed at once: rows that name it must find it.
    """
    digest = spec.digest
    if session.get(SpecRow, digest) is None:
        session.add(SpecRow(digest=digest, spec=spec.to_json()))
        session.flush()
    return digest
