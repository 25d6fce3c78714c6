"""The catalog: what is known of captures, shards and jobs, in one SQL database.

SQLite in WAL mode by default (``<data>/catalog.sqlite``), any database by its SQLAlchemy URL. It is an index, not the
truth: the truth of a dump is its file in the spool, the truth of a sample is its dataset's manifest, and after a crash
the catalog is brought to agree with them. What only the catalog knows are the loss masks and metadata of captures that
are not packed yet, and how far jobs are.

All methods block, and are safe to call from several threads; the service calls them on worker threads. Rows come back
detached: plain objects to read, never to write to.
"""

from __future__ import annotations

from pathlib import Path

from sglang_capture.catalog.captures import Captures, DumpFacts, FailureFacts, Outcome, SpooledGroup, is_record_of
from sglang_capture.catalog.database import Database
from sglang_capture.catalog.jobs import JobError, JobProgress, Jobs
from sglang_capture.catalog.masks import pack_mask, unpack_mask
from sglang_capture.catalog.shards import SampleFacts, Shards
from sglang_capture.catalog.tables import CaptureRow, JobErrorRow, JobRow, ShardRow

__all__ = [
    "CaptureRow",
    "Catalog",
    "DumpFacts",
    "FailureFacts",
    "JobError",
    "JobErrorRow",
    "JobProgress",
    "JobRow",
    "Outcome",
    "SampleFacts",
    "ShardRow",
    "SpooledGroup",
    "is_record_of",
    "pack_mask",
    "sqlite_url",
    "unpack_mask",
]


class Catalog:
    """One database, seen as :attr:`captures`, :attr:`shards` and :attr:`jobs`.

    Args:
        url: a SQLAlchemy URL; the tables are made if they are not there.

    Raises:
        CaptureError: the database cannot be opened, or a newer version of this project made it.
    """

    def __init__(self, url: str):
        self._database = Database(url)
        self.captures = Captures(self._database)
        self.shards = Shards(self._database)
        self.jobs = Jobs(self._database)

    def close(self) -> None:
        self._database.close()


def sqlite_url(path: Path) -> str:
    """The URL of the SQLite file ``path``."""
    return f"sqlite:///{path.absolute()}"
