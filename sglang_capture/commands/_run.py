"""What `run` does: the checks before it starts, the bar while it runs, the summary at its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sglang_capture.client import ServiceClient
from sglang_capture.commands._bulk import BulkSender, Fault, MaskCount, RowReader, Tally
from sglang_capture.commands._model import chosen_last_hidden, chosen_layers
from sglang_capture.commands._output import (
    error_console,
    human_bytes,
    plural,
    print_facts,
    print_json,
    reading_bar,
    say,
    say_masks,
)
from sglang_capture.commands._rows import RowOptions
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.prompts import ChatTokenizer, Layout, RowSource
from sglang_capture.spool import SpoolStatus

_READY_SECONDS = 15.0
_READY_PAUSE_SECONDS = 1.0
_REFRESH_SECONDS = 0.2
_FAULTS_SHOWN = 20


@dataclass(frozen=True)
class RunOptions:
    """The options of `run`, by the names it documents them under."""

    rows: RowOptions
    service: str
    api_key: str | None
    layers: str | None
    last_hidden: str | None
    concurrency: int
    tokenizer: str | None
    trust_remote_code: bool
    layout: Layout
    generate: dict[str, Any] | None
    limit: int | None
    patience: float
    as_json: bool


def run_file(options: RunOptions) -> int:
    """Capture a file; the exit code.

    Raises:
        CaptureError: nothing can be captured: no service, no server, no plugin, no such layers.
        UsageError: there is no row, the rows cannot be read, or options contradict each other.
    """
    if options.generate is not None and options.tokenizer is not None:
        raise UsageError(
            "with --generate the service lays out the conversations: set SGLANG_CAPTURE_TOKENIZER where it runs, "
            "and leave out --tokenizer"
        )
    source = options.rows.open()
    total = _total(source, options.limit)
    if total == 0:
        raise UsageError(f"{source.name} holds no row: nothing to capture")
    started = time.monotonic()
    tally, masks = asyncio.run(_capture(options, source, total))
    summary = _summary(tally, masks, total, time.monotonic() - started)
    if options.as_json:
        print_json(summary)
    else:
        _print_summary(summary)
    return 1 if summary["missing"] or summary["stopped"] else 0


def _total(source: RowSource, limit: int | None) -> int | None:
    """How many rows will be captured; ``None`` if that is only known at the end."""
    with reading_bar("reading", source.size) as seen:
        rows = source.count(seen)
    return rows if limit is None or rows is None else min(rows, limit)


async def _capture(options: RunOptions, source: RowSource, total: int | None) -> tuple[Tally, MaskCount]:
    console = error_console()
    async with ServiceClient(options.service, api_key=options.api_key) as client:
        plugin = await _ready_plugin(client)
        spec = plugin["spec"]
        reader = RowReader(
            islice(source.rows(), options.limit),
            lambda: _tokenizer(options, plugin, console),
            spec["vocab_size"],
            layout=options.layout,
            column=options.rows.column,
            generate=options.generate,
        )
        sender = BulkSender(
            client,
            reader,
            concurrency=options.concurrency,
            patience=options.patience,
            layers=chosen_layers(options.layers, spec["num_layers"]),
            last_hidden=chosen_last_hidden(options.last_hidden),
            on_fault=_FaultPrinter(source, console),
        )
        with _stopped_by_signals(sender), _progress(console) as progress:
            watcher = asyncio.create_task(_watch(sender.tally, total, progress))
            try:
                return await sender.run(), reader.masks
            finally:
                watcher.cancel()


async def _ready_plugin(client: ServiceClient) -> dict[str, Any]:
    """The status of a plugin that captures, on a server that answers; a busy server is asked again for a while.

    Raises:
        CaptureError: as it stands nothing can be captured; the message has the service's own words on what to do.
    """
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        health = await client.health()
        plugin = health["plugin"]
        captures = plugin is not None and plugin["state"] == "capturing" and not _stale(health)
        if captures and health["engine"]["reachable"]:
            return dict(plugin)
        if not captures or time.monotonic() > deadline:
            break
        await asyncio.sleep(_READY_PAUSE_SECONDS)
    raise CaptureError("the side service runs, but nothing can be captured: " + "; ".join(health["problems"]))


def _stale(health: dict[str, Any]) -> bool:
    """Whether the status is an old one. The service sees that too: clocks that differ alone make none stale."""
    return bool(health["problems"]) and not SpoolStatus.model_validate(health["plugin"]).alive


def _tokenizer(options: RunOptions, plugin: dict[str, Any], console: Console) -> ChatTokenizer | None:
    """The tokenizer that was named, else the server's where it can be loaded here, else none: the service has it."""
    path = options.tokenizer or plugin["tokenizer_path"] or plugin["model_path"]
    tokenizer = ChatTokenizer(path, trust_remote_code=options.trust_remote_code)
    try:
        tokenizer.load()
    except CaptureError as error:
        if options.tokenizer:
            raise
        say(f"the service lays out the messages, because here {error}", "warn", console=console)
        return None
    return tokenizer


class _FaultPrinter:
    """Names the first bad rows as they are found; the rest is in the summary's counts."""

    def __init__(self, source: RowSource, console: Console) -> None:
        self._source = source
        self._console = console
        self._shown = 0

    def __call__(self, fault: Fault) -> None:
        self._shown += 1
        if self._shown <= _FAULTS_SHOWN:
            say(f"{self._source.place(fault.line)}: {fault.reason}", "wrong", console=self._console)
        elif self._shown == _FAULTS_SHOWN + 1:
            say("more such rows are only counted; --json lists the first thousand", console=self._console)


@contextlib.contextmanager
def _stopped_by_signals(sender: BulkSender) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends the run in good order; the next one ends the process."""
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        loop.remove_signal_handler(number)
        sender.stop("interrupted")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


async def _watch(tally: Tally, total: int | None, progress: Progress) -> None:
    task = progress.add_task("", total=total, rate="", note="")
    started = time.monotonic()
    while True:
        seconds = max(time.monotonic() - started, 1e-3)
        missing = tally.bad_rows + tally.failed
        progress.update(
            task,
            completed=tally.settled,
            rate=f"{tally.captured / seconds:,.1f} conversations/s · {tally.tokens / seconds:,.0f} tokens/s",
            note=f"waiting: {tally.waiting:.60}" if tally.waiting else plural(missing, "fault") if missing else "",
        )
        await asyncio.sleep(_REFRESH_SECONDS)


def _summary(tally: Tally, masks: MaskCount, total: int | None, seconds: float) -> dict[str, Any]:
    """Where it is not known how many rows there are, a run that was not stopped has tried all."""
    not_tried = 0 if total is None else total - tally.settled
    return {
        "rows": tally.settled if total is None else total,
        "captured": tally.captured,
        "already_there": tally.reused,
        "duplicates": tally.duplicates,
        "too_long": tally.too_long,
        "bad_rows": tally.bad_rows,
        "failed": tally.failed,
        "not_tried": not_tried,
        "missing": tally.bad_rows + tally.failed + not_tried,
        "without_mask": masks.without,
        "masks_all_zero": masks.all_zero,
        "masks_all_one": masks.all_one,
        "tokens": tally.tokens,
        "bytes": tally.bytes,
        "seconds": round(seconds, 3),
        "conversations_per_second": round(tally.captured / seconds, 3),
        "tokens_per_second": round(tally.tokens / seconds, 1),
        "stopped": tally.stopped,
        "faults": [asdict(fault) for fault in tally.faults],
    }


def _print_summary(summary: dict[str, Any]) -> None:
    amount = f"{plural(summary['tokens'], 'token')}, {human_bytes(summary['bytes'])}"
    facts = [
        ("captured", f"{plural(summary['captured'], 'conversation')}: {amount}"),
        ("already there", f"{summary['already_there']:,}"),
        ("duplicates", f"{summary['duplicates']:,}"),
        ("without mask", f"{summary['without_mask']:,}"),
        ("too long", f"{summary['too_long']:,}"),
        ("bad rows", f"{summary['bad_rows']:,}"),
        ("failed", f"{summary['failed']:,}"),
        ("left", f"{summary['not_tried']:,}"),
        (
            "time",
            f"{summary['seconds']:,.1f} s: {summary['conversations_per_second']:,.1f} conversations/s, "
            f"{summary['tokens_per_second']:,.0f} tokens/s",
        ),
    ]
    optional = {"already there", "duplicates", "without mask", "too long", "bad rows", "failed", "left"}
    print_facts((name, value) for name, value in facts if value != "0" or name not in optional)
    say_masks(summary["masks_all_zero"], summary["masks_all_one"])
    if not summary["rows"]:
        say("there is no row", "warn")
    elif summary["stopped"]:
        say(f"stopped: {summary['stopped']}", "wrong")
        say("The same command goes on from here; what was captured is not captured twice.")
    elif summary["missing"]:
        say(f"{plural(summary['missing'], 'row')} of {summary['rows']:,} missing", "wrong")
    else:
        say("nothing is missing", "ok")
