"""Captures in the catalog: recording what the spool shows, and looking things up.

A capture goes ``pending → spooled → packed``, or to ``failed`` and from there back to ``pending`` when it is tried
again. A good record is never downgraded by a late failure of the same id (a retry, ``n > 1``): the first complete
dump stands, whoever asked for it. If that is not who the record is of, it becomes the record of the dump.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import exists, func, literal_column, select
from sqlalchemy.orm import Session, joinedload, undefer

from sglang_capture.catalog import origin
from sglang_capture.catalog.database import Database
from sglang_capture.catalog.masks import mask_length
from sglang_capture.catalog.rows import chunks, disown, fail, find_captures, move, new_capture, remember_spec
from sglang_capture.catalog.tables import CaptureRow, CaptureState, FailureKind, SpecRow, TotalRow
from sglang_capture.spec import CaptureSpec

Outcome = Literal["spooled", "known", "duplicate", "mask", "refused"]
"""What a dump turned out to be: new · recorded before · of a capture that is packed already · of another length than
the loss mask that was sent with it · of other ids than those that were sent."""


@dataclass(frozen=True)
class DumpFacts:
    """What the catalog keeps of a dump, and what tells whose it is.

    Attributes:
        ran: its ids, as :func:`~sglang_capture.catalog.origin.of_ids` names them.
        request_id: of the request that it was captured from.
    """

    id: str
    tokens: int
    spec: CaptureSpec
    ran: str
    request_id: str = ""


@dataclass(frozen=True)
class FailureFacts:
    """What the catalog keeps of a failure."""

    id: str
    kind: FailureKind
    reason: str
    retriable: bool = False


@dataclass(frozen=True)
class SpooledGroup:
    """The spooled captures of one spec, together; ``oldest`` is when the first of them was spooled."""

    spec_digest: str
    captures: int
    size: int
    oldest: float


class Captures:
    """The captures of one catalog."""

    def __init__(self, database: Database):
        self._database = database

    def get(self, capture_id: str, *, with_mask: bool = False) -> CaptureRow | None:
        """One capture with its spec and shard, and with its loss mask if that is wanted."""
        query = select(CaptureRow).where(CaptureRow.id == capture_id).options(*_WITH_CONTEXT)
        with self._database.read() as session:
            return session.scalar(query.options(undefer(CaptureRow.loss_mask)) if with_mask else query)

    def page(
        self, *, state: CaptureState | None = None, before: int | None = None, limit: int = 100
    ) -> Sequence[CaptureRow]:
        """Captures from the newest on, those with a ``seq`` below ``before``; an index finds the first of them."""
        query = select(CaptureRow).order_by(CaptureRow.seq.desc()).limit(limit).options(*_WITH_CONTEXT)
        if state is not None:
            query = query.where(CaptureRow.state == state)
        if before is not None:
            query = query.where(CaptureRow.seq < before)
        with self._database.read() as session:
            return session.scalars(query).all()

    def totals(self) -> dict[CaptureState, TotalRow]:
        """Count, tokens and bytes by state."""
        with self._database.read() as session:
            return {row.state: row for row in session.scalars(select(TotalRow))}

    def states(self, ids: Iterable[str]) -> dict[str, CaptureState]:
        """The states of those of ``ids`` that are known."""
        found: dict[str, CaptureState] = {}
        with self._database.read() as session:
            for some in chunks(ids):
                query = select(CaptureRow.id, CaptureRow.state).where(CaptureRow.id.in_(some))
                found.update((capture_id, state) for capture_id, state in session.execute(query))
        return found

    def spooled_ids(self) -> set[str]:
        """The ids of all spooled captures: as many as the spool has room for."""
        with self._database.read() as session:
            return set(session.scalars(select(CaptureRow.id).where(CaptureRow.state == "spooled")))

    def spooled_groups(self) -> list[SpooledGroup]:
        """What waits to be packed, by spec."""
        query = (
            select(
                CaptureRow.spec_digest,
                func.count(),
                func.sum(CaptureRow.size),
                func.min(CaptureRow.updated),
            )
            .where(_IS_SPOOLED)
            .group_by(CaptureRow.spec_digest)
        )
        with self._database.read() as session:
            return [
                SpooledGroup(digest or "", captures, size or 0, oldest)
                for digest, captures, size, oldest in session.execute(query)
            ]

    def spooled_specs(self, ids: Iterable[str] | None = None) -> dict[str, CaptureSpec]:
        """The specs that spooled captures (of ``ids``) have, by digest."""
        with self._database.read() as session:
            if ids is None:
                waits = exists().where(_IS_SPOOLED, CaptureRow.spec_digest == SpecRow.digest)
                specs = session.scalars(select(SpecRow).where(waits)).all()
            else:
                digests = {digest for digest, _, _ in _spooled_of(session, ids)}
                specs = session.scalars(select(SpecRow).where(SpecRow.digest.in_(digests))).all()
        return {row.digest: CaptureSpec.from_json(row.spec) for row in sorted(specs, key=lambda row: row.digest)}

    def spooled(
        self, spec_digest: str, *, limit: int, most_bytes: int | None = None, ids: Iterable[str] | None = None
    ) -> list[CaptureRow]:
        """Spooled captures of one spec with their loss masks, in the order in which they became known.

        Args:
            most_bytes: of their payloads together; the first one comes however large it is.
        """
        with self._database.read() as session:
            waiting = _waiting(session, spec_digest, limit, ids)
            sizes = itertools.accumulate(size for _, size in waiting)
            fits = (not taken or most_bytes is None or size <= most_bytes for taken, size in enumerate(sizes))
            seqs = [seq for (seq, _), fit in zip(waiting, fits, strict=True) if fit]
            query = select(CaptureRow).order_by(CaptureRow.seq).options(undefer(CaptureRow.loss_mask))
            return [row for some in chunks(seqs) for row in session.scalars(query.where(CaptureRow.seq.in_(some)))]

    def begin(
        self,
        capture_id: str,
        *,
        request_digest: str,
        sent: str,
        spec: CaptureSpec,
        loss_mask: bytes | None,
        metadata: dict[str, Any],
    ) -> CaptureRow:
        """Record that a capture is about to be sent, replacing a record that is pending or failed.

        Returns:
            the record, which stands unchanged if its dump is there already.
        """
        with self._database.write() as session:
            row = find_captures(session, [capture_id]).get(capture_id) or new_capture(session, capture_id)
            if row.state in ("spooled", "packed"):
                return row
            row.request_digest = request_digest
            row.sent = sent
            row.spec_digest = remember_spec(session, spec)
            row.loss_mask = loss_mask
            row.mask_tokens = None if loss_mask is None else mask_length(loss_mask)
            row.meta = metadata
            move(row, "pending")
            return row

    def record_dumps(self, dumps: Sequence[DumpFacts]) -> dict[str, Outcome]:
        """Record dumps seen in the spool, in one transaction; a failed or pending record becomes a good one.

        So does the record of a spooled dump that is there no more, since another lies under its id.
        """
        with self._database.write() as session:
            digests = [dump.spec.digest for dump in dumps]
            for spec in {digest: dump.spec for digest, dump in zip(digests, dumps, strict=True)}.values():
                remember_spec(session, spec)
            rows = find_captures(session, [dump.id for dump in dumps])
            return {
                dump.id: _record_dump(session, rows.get(dump.id), dump, digest)
                for digest, dump in zip(digests, dumps, strict=True)
            }

    def record_failures(self, failures: Sequence[FailureFacts]) -> None:
        """Record failures, in one transaction; captures that have a dump are left as they are."""
        with self._database.write() as session:
            rows = find_captures(session, [failure.id for failure in failures])
            for failure in failures:
                row = rows.get(failure.id) or new_capture(session, failure.id)
                if row.state not in ("spooled", "packed"):
                    fail(row, failure.kind, failure.reason, failure.retriable)

    def lose(self, ids: Iterable[str], kind: FailureKind, reason: str) -> list[str]:
        """Record that dumps are gone or bad; only captures that are still spooled are touched, and returned."""
        lost = []
        with self._database.write() as session:
            for row in find_captures(session, list(ids)).values():
                if row.state == "spooled":
                    fail(row, kind, reason, kind == "vanished")
                    lost.append(row.id)
        return lost

    def interrupt(self) -> int:
        """Turn what a stopped service left pending into retriable failures; returns how many there were."""
        with self._database.write() as session:
            rows = session.scalars(select(CaptureRow).where(CaptureRow.state == "pending")).all()
            for row in rows:
                fail(row, "failed", "the service stopped while this capture was under way; send it again", True)
            return len(rows)

    def forget(self, capture_id: str) -> bool:
        """Drop the record of a capture that is not packed; whether there was one."""
        with self._database.write() as session:
            row = find_captures(session, [capture_id]).get(capture_id)
            if row is None or row.state == "packed":
                return False
            session.delete(row)
            return True


_WITH_CONTEXT = (joinedload(CaptureRow.spec), joinedload(CaptureRow.shard))

_IS_SPOOLED = CaptureRow.state == literal_column("'spooled'")
"""Spelt out: SQLite uses a partial index only for a condition that is its own, which no parameter is."""


def _waiting(session: Session, spec_digest: str, limit: int, ids: Iterable[str] | None) -> list[tuple[int, int]]:
    """``seq`` and size of the first spooled captures of a spec, the oldest first."""
    if ids is not None:
        return sorted((seq, size) for digest, seq, size in _spooled_of(session, ids) if digest == spec_digest)[:limit]
    query = (
        select(CaptureRow.seq, CaptureRow.size)
        .where(_IS_SPOOLED, CaptureRow.spec_digest == spec_digest)
        .order_by(CaptureRow.seq)
        .limit(limit)
    )
    return [(seq, size or 0) for seq, size in session.execute(query)]


def _spooled_of(session: Session, ids: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """Spec, ``seq`` and size of those of ``ids`` that are spooled.

    The state is looked at here: asked for both, SQLite goes through all that is spooled for every few ids.
    """
    for some in chunks(ids):
        query = select(CaptureRow.spec_digest, CaptureRow.seq, CaptureRow.size, CaptureRow.state)
        for digest, seq, size, state in session.execute(query.where(CaptureRow.id.in_(some))):
            if state == "spooled":
                yield digest or "", seq, size or 0


def is_record_of(row: CaptureRow, dump: DumpFacts) -> bool:
    """Whether a record was made from this dump: of its content, its length and its spec."""
    return (
        row.spec_digest == dump.spec.digest
        and row.tokens == dump.tokens
        and origin.proven(row.sent, ran=dump.ran, request_id=dump.request_id)
        and not origin.altered(row.sent, ran=dump.ran)
    )


def _record_dump(session: Session, row: CaptureRow | None, dump: DumpFacts, spec_digest: str) -> Outcome:
    row = row or new_capture(session, dump.id)
    if row.state == "spooled" and is_record_of(row, dump):
        return "known"
    if row.state == "packed":
        return "duplicate"
    if row.request_digest is None or not _is_asked_for(session, row, dump):
        disown(row, origin.told_by(ran=dump.ran, request_id=dump.request_id))
    elif row.mask_tokens is not None and row.mask_tokens != dump.tokens:
        reason = f"loss_mask has {row.mask_tokens} entries, and the engine ran {dump.tokens} tokens"
        fail(row, "mask", reason, False)
        return "mask"
    elif origin.altered(row.sent, ran=dump.ran):
        reason = f"the engine ran {dump.tokens} tokens that are not those it was sent: does it cut long prompts?"
        fail(row, "refused", reason, False)
        return "refused"
    row.tokens, row.size = dump.tokens, dump.tokens * dump.spec.bytes_per_token
    row.spec_digest = spec_digest
    move(row, "spooled")
    return "spooled"


def _is_asked_for(session: Session, row: CaptureRow, dump: DumpFacts) -> bool:
    """Whether a dump is what the request of a record asked for: its content, its layers, its last hidden states."""
    if not origin.proven(row.sent, ran=dump.ran, request_id=dump.request_id):
        return False
    asked = CaptureSpec.from_json(session.get_one(SpecRow, row.spec_digest).spec)
    return (asked.layers, asked.last_hidden) == (dump.spec.layers, dump.spec.last_hidden)
