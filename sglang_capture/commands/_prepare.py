"""What `prepare` does: rows in, ids and masks out, and the figures that tell whether the masks are right."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from sglang_capture.commands._bulk import Fault, MaskCount
from sglang_capture.commands._model import read_vocab_size
from sglang_capture.commands._output import (
    error_console,
    plural,
    print_facts,
    print_json,
    rows_with_bar,
    say,
    say_masks,
)
from sglang_capture.commands._rows import RowOptions
from sglang_capture.errors import CaptureError, UsageError
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
from sglang_capture.prompts.lengths import runs
from sglang_capture.prompts.rows import CUT_KEY

_FAULTS_KEPT = 1000
_FAULTS_SHOWN = 20


@dataclass(frozen=True)
class PrepareOptions:
    """The options of `prepare`, by the names it documents them under."""

    rows: RowOptions
    out: Path
    tokenizer: str
    trust_remote_code: bool
    layout: Layout
    limit: int | None
    show: int


@dataclass
class _Statistics:
    """What became of the rows."""

    rows: int = 0
    written: int = 0
    duplicates: int = 0
    too_long: int = 0
    bad_rows: int = 0
    cut: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0
    masks: MaskCount = field(default_factory=MaskCount)
    faults: list[Fault] = field(default_factory=list)

    def add(self, prompt: Prompt) -> None:
        ids, mask = prompt.input_ids or [], prompt.loss_mask
        self.written += 1
        self.cut += CUT_KEY in prompt.metadata
        self.tokens += len(ids)
        self.longest = max(self.longest, len(ids))
        self.supervised_tokens += sum(mask or [])
        self.masks.add(mask)

    def reject(self, number: int, error: RowError) -> None:
        if isinstance(error, TooLong):
            self.too_long += 1
            return
        self.bad_rows += 1
        if len(self.faults) < _FAULTS_KEPT:
            self.faults.append(Fault(number, str(error)))


def run_prepare(options: PrepareOptions, *, as_json: bool) -> int:
    """Write the file; the exit code.

    Raises:
        UsageError: the rows cannot be read, or the output cannot be written.
        CaptureError: the tokenizer cannot be loaded.
    """
    _check_out(options)
    source = options.rows.open()
    tokenizer = ChatTokenizer(options.tokenizer, trust_remote_code=options.trust_remote_code)
    tokenizer.load()
    vocab_size = read_vocab_size(options.tokenizer)
    if vocab_size is None:
        unchecked = (
            f"no config.json of {options.tokenizer} says how large the vocabulary is: ids are not compared with it"
        )
        say(unchecked, "warn", console=error_console())
    console = error_console() if as_json else Console(highlight=False)
    statistics, seen = _Statistics(), set[str]()
    with _replacing(options.out) as file, rows_with_bar(source, "preparing") as rows:
        for number, row in islice(rows, options.limit):
            statistics.rows += 1
            try:
                prompt = _prepare(row, tokenizer, options)
                if vocab_size is not None:
                    check_vocabulary(prompt, vocab_size)
            except RowError as error:
                statistics.reject(number, error)
                continue
            if prompt.capture_id in seen:
                statistics.duplicates += 1
                continue
            seen.add(prompt.capture_id)
            file.write(_line(prompt))
            statistics.add(prompt)
            if statistics.written <= options.show:
                show_prompt(prompt, tokenizer, console)
    for fault in statistics.faults[:_FAULTS_SHOWN]:
        say(f"{source.place(fault.line)}: {fault.reason}", "wrong", console=error_console())
    summary = _summary(statistics, options)
    print_json(summary) if as_json else _print_summary(summary)
    return 1 if statistics.bad_rows else 0


def _check_out(options: PrepareOptions) -> None:
    """Raises UsageError: the output would take the place of the input."""
    source = Path(options.rows.file)
    if source.exists() and options.out.exists() and options.out.samefile(source):
        raise UsageError(f"{options.out} is the file that is read: give the prepared rows another name")


def show_prompt(prompt: Prompt, tokenizer: ChatTokenizer, console: Console) -> None:
    """One conversation as the model reads it; what is supervised in green, or in ⟦ ⟧ where there are no colours."""
    ids, place = prompt.input_ids or [], 0
    shown = Text()
    for start, stop in [*runs(prompt.loss_mask or []), (len(ids), len(ids))]:
        shown.append(tokenizer.decode(ids[place:start]), "dim")
        if stop > start:
            answer = tokenizer.decode(ids[start:stop])
            shown.append(answer if console.color_system else f"⟦{answer}⟧", "bold green")
        place = stop
    supervised = "no loss mask" if prompt.loss_mask is None else f"{sum(prompt.loss_mask):,} supervised"
    console.rule(Text(f"{prompt.capture_id} · {plural(len(ids), 'token')}, {supervised}"))
    console.print(shown, soft_wrap=True)


def _prepare(row: dict[str, Any] | RowError, tokenizer: ChatTokenizer, options: PrepareOptions) -> Prompt:
    if isinstance(row, RowError):
        raise row
    row = canonical(row, options.rows.column)
    if "text" not in row:
        return parse_row(row, tokenizer, options.layout)
    ids, most = tokenizer.encode_text(row.pop("text")), options.layout.max_length
    if most is not None and len(ids) > most:
        row["metadata"] = {**row.get("metadata", {}), CUT_KEY: len(ids)}
    return parse_row({**row, "input_ids": ids[:most]}, None)


def _line(prompt: Prompt) -> str:
    """The row that `run` takes as it is; one that had no id is named after its content, as `run` would."""
    row = {
        "id": prompt.capture_id,
        "input_ids": prompt.input_ids,
        "loss_mask": prompt.loss_mask,
        "metadata": prompt.metadata or None,
    }
    return json.dumps({key: value for key, value in row.items() if value is not None}, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """A file that takes the name ``path`` when all of it is on disk, and leaves nothing behind otherwise.

    Raises:
        UsageError: it cannot be written.
        CaptureError: the disk is full.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CaptureError(f"no room left for {path}: free some space, or name another place") from error
        raise UsageError(f"{path} cannot be written: {error.strerror}; name another place") from error
    finally:
        part.unlink(missing_ok=True)


def _summary(statistics: _Statistics, options: PrepareOptions) -> dict[str, Any]:
    figures = asdict(statistics)
    masks = figures.pop("masks")
    faults = figures.pop("faults")
    return {
        "out": str(options.out),
        **figures,
        "without_mask": masks["without"],
        "masks_all_zero": masks["all_zero"],
        "masks_all_one": masks["all_one"],
        "faults": faults,
    }


def _print_summary(summary: dict[str, Any]) -> None:
    share = summary["supervised_tokens"] / max(1, summary["tokens"])
    facts = [
        ("written", f"{plural(summary['written'], 'conversation')} to {summary['out']}"),
        ("tokens", f"{summary['tokens']:,}; the longest conversation {summary['longest']:,}"),
        ("supervised", f"{summary['supervised_tokens']:,} tokens, {share:.1%}"),
        ("without mask", f"{summary['without_mask']:,}"),
        ("cut", f"{summary['cut']:,}"),
        ("too long", f"{summary['too_long']:,}"),
        ("duplicates", f"{summary['duplicates']:,}"),
        ("bad rows", f"{summary['bad_rows']:,}"),
    ]
    print_facts((name, value) for name, value in facts if value != "0")
    say_masks(summary["masks_all_zero"], summary["masks_all_one"])
    if not summary["rows"]:
        say("there is no row", "warn")
