"""Jobs in the catalog: what each is for, and how far it is.

Progress is a watermark: every line up to it is settled, and the counts are those of these lines. What was settled
beyond it when the service died is looked at again, and found captured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from sglang_capture.catalog.database import Database
from sglang_capture.catalog.tables import JobErrorRow, JobRow, JobState


@dataclass(frozen=True)
class JobProgress:
    """How far a job is: the counts of all lines up to ``watermark``."""

    watermark: int = 0
    captured: int = 0
    reused: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class JobError:
    """Why a line has no capture; ``capture_id`` is unknown where the line could not be read."""

    line: int
    capture_id: str | None
    reason: str


class Jobs:
    """The jobs of one catalog."""

    def __init__(self, database: Database):
        self._database = database

    def add(self, job_id: str, *, source: str, rows: int, options: dict[str, Any]) -> JobRow:
        """Record a job that is about to run."""
        now = time.time()
        with self._database.write() as session:
            job = JobRow(
                id=job_id, state="running", source=source, rows=rows, options=options, created=now, updated=now
            )
            session.add(job)
            return job

    def get(self, job_id: str) -> JobRow | None:
        """One job."""
        with self._database.read() as session:
            return session.scalar(select(JobRow).where(JobRow.id == job_id))

    def page(self, *, before: int | None = None, limit: int = 100) -> Sequence[JobRow]:
        """Jobs from the newest on, those with a ``seq`` below ``before``."""
        query = select(JobRow).order_by(JobRow.seq.desc()).limit(limit)
        if before is not None:
            query = query.where(JobRow.seq < before)
        with self._database.read() as session:
            return session.scalars(query).all()

    def running(self) -> Sequence[JobRow]:
        """The jobs that a start of the service takes up again, the oldest first."""
        with self._database.read() as session:
            return session.scalars(select(JobRow).where(JobRow.state == "running").order_by(JobRow.seq)).all()

    def counts(self) -> dict[str, int]:
        """How many jobs are in each state."""
        with self._database.read() as session:
            return {
                row[0]: row[1] for row in session.execute(select(JobRow.state, func.count()).group_by(JobRow.state))
            }

    def advance(self, job_id: str, progress: JobProgress, errors: Sequence[JobError]) -> None:
        """Record how far a job is and what failed on the way, in one transaction."""
        with self._database.write() as session:
            job = session.scalars(select(JobRow).where(JobRow.id == job_id)).one()
            for name, value in vars(progress).items():
                setattr(job, name, value)
            job.updated = time.time()
            for error in errors:
                session.merge(JobErrorRow(job_seq=job.seq, **vars(error)))

    def end(self, job_id: str, state: JobState, problem: str = "") -> None:
        """Record how a job ended."""
        with self._database.write() as session:
            job = session.scalars(select(JobRow).where(JobRow.id == job_id)).one()
            job.state, job.problem, job.updated = state, problem, time.time()

    def errors(self, job_id: str, *, after: int = 0, limit: int = 100) -> Sequence[JobErrorRow]:
        """The failed lines of a job, from line ``after`` + 1 on."""
        query = (
            select(JobErrorRow)
            .join(JobRow, JobRow.seq == JobErrorRow.job_seq)
            .where(JobRow.id == job_id, JobErrorRow.line > after)
            .order_by(JobErrorRow.line)
            .limit(limit)
        )
        with self._database.read() as session:
            return session.scalars(query).all()
