"""Shards in the catalog: which there are, and which captures are their samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import joinedload

from sglang_capture.catalog.database import Database
from sglang_capture.catalog.rows import fail, find_captures, move, new_capture, remember_spec
from sglang_capture.catalog.tables import CaptureRow, ShardRow
from sglang_capture.spec import CaptureSpec


@dataclass(frozen=True)
class SampleFacts:
    """What the catalog keeps of a sample."""

    id: str
    tokens: int
    metadata: dict[str, Any] = field(default_factory=dict)


class Shards:
    """The shards of one catalog."""

    def __init__(self, database: Database):
        self._database = database

    def record(
        self, dataset: str, name: str, spec: CaptureSpec, *, size: int, samples: Sequence[SampleFacts]
    ) -> ShardRow:
        """Record a shard that its dataset's manifest names, and its samples as packed; twice changes nothing.

        A sample that no record is of (the catalog was lost) gets one. One that is packed already stays where it is.
        """
        with self._database.write() as session:
            shard = session.scalar(_named(dataset, name))
            if shard is None:
                shard = ShardRow(
                    dataset=dataset,
                    name=name,
                    spec_digest=remember_spec(session, spec),
                    samples=len(samples),
                    tokens=sum(sample.tokens for sample in samples),
                    size=size,
                    created=time.time(),
                )
                session.add(shard)
                session.flush()
            rows = find_captures(session, [sample.id for sample in samples])
            for position, sample in enumerate(samples):
                row = rows.get(sample.id) or new_capture(session, sample.id, sample.metadata)
                if row.state != "packed":
                    row.tokens, row.size = sample.tokens, sample.tokens * spec.bytes_per_token
                    row.spec_digest = shard.spec_digest
                    row.shard_seq, row.sample = shard.seq, position
                    row.loss_mask = None
                    move(row, "packed")
            return shard

    def names(self) -> set[tuple[str, str]]:
        """Dataset and file name of every shard known."""
        with self._database.read() as session:
            return {(row[0], row[1]) for row in session.execute(select(ShardRow.dataset, ShardRow.name))}

    def get(self, seqs: Sequence[int]) -> Sequence[ShardRow]:
        """Some shards with their specs, the oldest first."""
        query = select(ShardRow).where(ShardRow.seq.in_(seqs)).order_by(ShardRow.seq)
        with self._database.read() as session:
            return session.scalars(query.options(joinedload(ShardRow.spec))).all()

    def page(self, *, dataset: str | None = None, before: int | None = None, limit: int = 100) -> Sequence[ShardRow]:
        """Shards from the newest on, those with a ``seq`` below ``before``."""
        query = select(ShardRow).order_by(ShardRow.seq.desc()).limit(limit).options(joinedload(ShardRow.spec))
        if dataset is not None:
            query = query.where(ShardRow.dataset == dataset)
        if before is not None:
            query = query.where(ShardRow.seq < before)
        with self._database.read() as session:
            return session.scalars(query).all()

    def lose(self, dataset: str, names: Iterable[str]) -> list[str]:
        """Record that shards are gone from their dataset; their captures, now failed, are returned.

        Each shard has a transaction of its own: a dataset that was removed may be a million captures. Who dies on the
        way finds the others gone at the next start.
        """
        return [capture_id for name in names for capture_id in self._lose(dataset, name)]

    def _lose(self, dataset: str, name: str) -> list[str]:
        lost = []
        with self._database.write() as session:
            if (shard := session.scalar(_named(dataset, name))) is None:
                return []
            for row in session.scalars(select(CaptureRow).where(CaptureRow.shard_seq == shard.seq)).all():
                fail(row, "vanished", f"its shard {shard.name} is no longer in the dataset {dataset}", True)
                lost.append(row.id)
            session.flush()
            session.delete(shard)
        return lost


def _named(dataset: str, name: str) -> Select[ShardRow]:
    return select(ShardRow).where(ShardRow.dataset == dataset, ShardRow.name == name)
