"""The database behind the catalog: opening it, transactions, and the totals kept in step with the captures.

Writers stand in line behind one lock, and start with ``BEGIN IMMEDIATE`` on SQLite: a transaction that only becomes a
writer half-way can fail with "database is locked" no matter how long it would wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, get_args

from sqlalchemy import Engine, create_engine, event, inspect, select, text, update
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session

from sglang_capture.catalog.tables import Base, CaptureRow, CaptureState, FormatRow, TotalRow
from sglang_capture.errors import CaptureError

FORMAT_VERSION = 2
"""The version of the tables that this code writes; it reads older ones too, and brings them up to it."""

_UPGRADES = {1: ("ALTER TABLE captures ADD COLUMN sent VARCHAR(37)",)}
"""What makes of each version the next."""

_BUSY_SECONDS = 30
"""How long SQLite waits for another process (a reader's checkpoint, a backup) before it gives up."""


class Database:
    """Transactions on one catalog. Raises as :class:`~sglang_capture.catalog.Catalog`."""

    def __init__(self, url: str):
        self._write_lock = threading.Lock()
        try:
            self._engine = create_engine(url)
        except (ArgumentError, ImportError) as error:
            raise CaptureError(f"the catalog cannot be opened: {error}; check SGLANG_CAPTURE_CATALOG") from error
        if self._engine.dialect.name == "sqlite":
            _prepare_sqlite(self._engine)
        try:
            self._create()
        except SQLAlchemyError as error:
            shown = self._engine.url.render_as_string(hide_password=True)
            raise CaptureError(f"the catalog {shown} cannot be opened: {error}") from error

    @contextlib.contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one state of the database, and changes nothing."""
        with Session(self._engine, autoflush=False, expire_on_commit=False) as session:
            yield session

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction: all of it is kept when the block ends, nothing of it if the block raises."""
        engine = self._engine.execution_options(capture_writes=True)
        with self._write_lock, _WriteSession(engine, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        self._engine.dispose()

    def _create(self) -> None:
        Base.metadata.create_all(self._engine)
        for table in Base.metadata.sorted_tables:  # a table that was there may lack a newer index
            for index in table.indexes:
                index.create(self._engine, checkfirst=True)
        with self.write() as session:
            version = session.scalar(select(FormatRow.version))
            if version is None:
                session.add(FormatRow(version=FORMAT_VERSION))
                session.add_all(TotalRow(state=state) for state in get_args(CaptureState))
            elif version > FORMAT_VERSION:
                raise CaptureError(
                    f"the catalog has format version {version}, and this sglang-capture knows versions up to "
                    f"{FORMAT_VERSION}: update it, or name another catalog with SGLANG_CAPTURE_CATALOG"
                )
            else:
                _upgrade(session, version)


def _upgrade(session: Session, version: int) -> None:
    for older in range(version, FORMAT_VERSION):
        for statement in _UPGRADES[older]:
            session.execute(text(statement))
    session.execute(update(FormatRow).values(version=FORMAT_VERSION))


class _WriteSession(Session):
    """A session whose flushes book every change of a capture in ``totals``.

    Captures must therefore change as objects, never by a bulk ``UPDATE`` that no flush sees.
    """


@event.listens_for(_WriteSession, "before_flush")
def _keep_totals(session: Session, _context: object, _instances: object) -> None:
    moved: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in (*session.new, *session.dirty, *session.deleted):
        if isinstance(row, CaptureRow):
            if row not in session.new:
                _book(moved, -1, _as_stored(row))
            if row not in session.deleted:
                _book(moved, 1, (row.state, row.tokens, row.size))
    for state, (captures, tokens, size) in sorted(moved.items()):
        if captures or tokens or size:
            session.execute(
                update(TotalRow)
                .where(TotalRow.state == state)
                .values(
                    captures=TotalRow.captures + captures,
                    tokens=TotalRow.tokens + tokens,
                    size=TotalRow.size + size,
                )
            )


def _as_stored(row: CaptureRow) -> tuple[str, int | None, int | None]:
    """State, tokens and bytes as the database has them, whatever the object says by now."""
    stored = inspect(row).committed_state
    return (
        stored.get("state", row.state),
        stored.get("tokens", row.tokens),
        stored.get("size", row.size),
    )


def _book(moved: dict[str, list[int]], sign: int, entry: tuple[str, int | None, int | None]) -> None:
    state, tokens, size = entry
    moved[state][0] += sign
    moved[state][1] += sign * (tokens or 0)
    moved[state][2] += sign * (size or 0)


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # transactions begin below, not when the driver thinks so
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Any) -> None:
        writes = connection.get_execution_options().get("capture_writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
