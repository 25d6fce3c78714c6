"""Sending many rows to the side service: a bounded number in flight, retries, and a tally of what came of each.

Nothing is remembered between runs. The service knows by id and content what it has captured, and answers for it at
once; so sending everything again is how a run resumes, and the service remains the only one who knows.

While the service or its server is away, or the spool is full, rows wait; as long as anything at all is settled now and
then the run goes on. When nothing was for ``patience`` seconds, it ends and says what it was waiting for.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import xxhash

from sglang_capture.client import ServiceClient, ServiceError
from sglang_capture.prompts import (
    ChatTokenizer,
    Layout,
    Prompt,
    RowError,
    TooLong,
    canonical,
    check_vocabulary,
    parse_row,
)
from sglang_capture.prompts.rows import identity
from sglang_capture.spec import LastHidden

AWAY = frozenset({"service-unreachable", "no-plugin", "engine-unreachable", "spool-full", "in-flight"})
"""Problems that no row is to blame for: it waits until they are gone."""

FATAL = frozenset({"unauthorized", "no-tokenizer"})
"""Problems that every row would have."""

_ATTEMPTS = 3
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 15.0
_FAULTS_KEPT = 1000


@dataclass(frozen=True)
class Fault:
    """Why a line has no capture."""

    line: int
    reason: str


@dataclass
class Tally:
    """What came of the rows so far; ``tokens`` and ``bytes`` are of what this run captured."""

    captured: int = 0
    reused: int = 0
    duplicates: int = 0
    too_long: int = 0
    bad_rows: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    waiting: str = ""
    stopped: str = ""

    @property
    def settled(self) -> int:
        return self.captured + self.reused + self.duplicates + self.too_long + self.bad_rows + self.failed

    def add_fault(self, fault: Fault) -> None:
        if len(self.faults) < _FAULTS_KEPT:
            self.faults.append(fault)


@dataclass
class MaskCount:
    """How the loss masks are of what was sent; what the service lays out is not counted."""

    masked: int = 0
    without: int = 0
    all_zero: int = 0
    all_one: int = 0

    def add(self, mask: list[int] | None) -> None:
        if mask is None:
            self.without += 1
            return
        self.masked += 1
        self.all_zero += not any(mask)
        self.all_one += all(mask)


class RowReader:
    """Turns rows into what is sent, one after the other: reading, tokenizing, and leaving out what came before.

    Args:
        rows: as :meth:`~sglang_capture.prompts.RowSource.rows` gives them.
        tokenizer: asked for when the first conversation comes; ``None`` leaves it to the service to lay them out.
        vocab_size: ids outside are refused here; ``None`` if the server's is not known.
        column: the key that holds the content, where rows have several.
        generate: how the target shall write the answers; the service then lays out all rows.
    """

    def __init__(
        self,
        rows: Iterator[tuple[int, dict[str, Any] | RowError]],
        tokenizer: Callable[[], ChatTokenizer | None],
        vocab_size: int | None,
        *,
        layout: Layout = Layout(),  # noqa: B008 - frozen
        column: str | None = None,
        generate: dict[str, Any] | None = None,
    ) -> None:
        self.masks = MaskCount()
        self._rows = rows
        self._tokenizer = cache(tokenizer)
        self._vocab_size = vocab_size
        self._layout = layout
        self._column = column
        self._generate = generate
        self._seen: set[int] = set()

    def next(self) -> tuple[int, Prompt | dict[str, Any] | RowError | None] | None:
        """The line's number, and what to send for it (``None`` for what came before); ``None`` at the end."""
        found = next(self._rows, None)
        if found is None:
            return None
        line, row = found
        if isinstance(row, RowError):
            return line, row
        try:
            return line, self._prepare(canonical(row, self._column))
        except RowError as error:
            return line, error

    def _prepare(self, row: dict[str, Any]) -> Prompt | dict[str, Any] | None:
        wanted = "messages" in row or ("text" in row and self._layout.max_length is not None)
        tokenizer = self._tokenizer() if wanted and self._generate is None else None
        if self._generate is not None or (wanted and tokenizer is None):
            body = self._as_it_is(row)
            return None if self._repeats(body.get("capture_id") or json.dumps(body, sort_keys=True)) else body
        prompt = parse_row(row, tokenizer, self._layout)
        if self._vocab_size is not None:
            check_vocabulary(prompt, self._vocab_size)
        if self._repeats(prompt.capture_id):
            return None
        self.masks.add(prompt.loss_mask)
        return prompt

    def _as_it_is(self, row: dict[str, Any]) -> dict[str, Any]:
        """The body of ``POST /capture`` for a row that the service is to lay out."""
        capture_id, metadata = identity(row)
        content = {key: value for key, value in row.items() if key not in ("id", "capture_id", "metadata")}
        options = {
            "capture_id": capture_id,
            "metadata": metadata,
            "max_length": self._layout.max_length,
            "only_last_turn": self._layout.only_last_turn,
            "generate": self._generate,
        }
        return {**content, **{key: value for key, value in options.items() if value}}

    def _repeats(self, key: str) -> bool:
        number = xxhash.xxh3_64_intdigest(key.encode())
        known = number in self._seen
        self._seen.add(number)
        return known


class BulkSender:
    """Sends what a reader gives, ``concurrency`` rows at a time; :attr:`tally` can be watched while it does."""

    def __init__(
        self,
        client: ServiceClient,
        reader: RowReader,
        *,
        concurrency: int,
        patience: float,
        layers: tuple[int, ...] | None = None,
        last_hidden: LastHidden | None = None,
        on_fault: Callable[[Fault], None] = lambda _fault: None,
    ) -> None:
        self.tally = Tally()
        self._client = client
        self._reader = reader
        self._concurrency = concurrency
        self._patience = patience
        self._layers = layers
        self._last_hidden = last_hidden
        self._on_fault = on_fault
        self._last_settled = time.monotonic()
        self._stop = asyncio.Event()

    def stop(self, reason: str) -> None:
        """Take no more rows, and break off those in flight; what the service was told to capture it still captures."""
        self.tally.stopped = self.tally.stopped or reason
        self._stop.set()

    async def run(self) -> Tally:
        """Until every row has a capture or a fault, or :meth:`stop` was called."""
        self._last_settled = time.monotonic()
        with ThreadPoolExecutor(1, "rows") as thread:  # one: a tokenizer may not be shared
            workers = [asyncio.create_task(self._work(thread)) for _ in range(self._concurrency)]
            stopped = asyncio.create_task(self._stop.wait())
            done = asyncio.gather(*workers)
            ends: list[asyncio.Future[Any]] = [done, stopped]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if done.done():
                    done.result()
            finally:
                for task in (*workers, stopped):
                    task.cancel()
                await asyncio.gather(done, *workers, stopped, return_exceptions=True)
        return self.tally

    async def _work(self, thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while (item := await loop.run_in_executor(thread, self._reader.next)) is not None and not self._stop.is_set():
            line, body = item
            if body is None:
                self.tally.duplicates += 1
            elif isinstance(body, TooLong):
                self.tally.too_long += 1
            elif isinstance(body, RowError):
                self.tally.bad_rows += 1
                self._fault(line, str(body))
            else:
                await self._capture(line, body)

    async def _capture(self, line: int, body: Prompt | dict[str, Any]) -> None:
        attempt = 1
        while True:
            try:
                record = await self._client.capture(body, layers=self._layers, last_hidden=self._last_hidden)
            except ServiceError as error:
                if not self._may_go_on(error, attempt):
                    self._fail(line, error)
                    return
                await self._pause(error, attempt)
                attempt += 1
            else:
                self._count(record)
                return

    def _count(self, record: dict[str, Any]) -> None:
        self._settled()
        if record["reused"]:
            self.tally.reused += 1
            return
        self.tally.captured += 1
        self.tally.tokens += record["tokens"] or 0
        self.tally.bytes += record["bytes"] or 0

    def _may_go_on(self, error: ServiceError, attempt: int) -> bool:
        if error.kind in AWAY:
            return True
        return error.retriable and attempt < _ATTEMPTS

    def _fail(self, line: int, error: ServiceError) -> None:
        if error.kind in FATAL:
            self.stop(str(error))
            return
        self._settled()
        if error.kind == "too-long":
            self.tally.too_long += 1
            return
        self.tally.failed += 1
        self._fault(line, str(error))

    async def _pause(self, error: ServiceError, attempt: int) -> None:
        self.tally.waiting = str(error)
        if time.monotonic() - self._last_settled > self._patience:
            self.stop(f"nothing was captured for {self._patience:g} s. {error}")
        await asyncio.sleep(pause_seconds(error, attempt))

    def _settled(self) -> None:
        self.tally.waiting = ""
        self._last_settled = time.monotonic()

    def _fault(self, line: int, reason: str) -> None:
        fault = Fault(line, reason)
        self.tally.add_fault(fault)
        self._on_fault(fault)


def pause_seconds(error: ServiceError, attempt: int) -> float:
    """How long to wait after a failure: longer each time, and not all rows at the same moment."""
    longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(attempt, 10))
    return (error.retry_after or longest) * random.uniform(0.5, 1.0)
