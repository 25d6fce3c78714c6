"""Tables that ``datasets.load_from_disk`` maps: arrow files of our own making, described by the library itself.

::

    <folder>/data-00000.arrow     record batches, in arrow's stream format
    <folder>/dataset_info.json    the columns
    <folder>/state.json           the files in order, and the format in which rows are handed out: torch

``Dataset.save_to_disk`` would copy a whole table for every row that is added, so the arrow files are written here, row
by row, and only the two small files come from the library: it saves an empty table of the same columns, and the list of
files is put into its ``state.json``. That one is written last, for ``load_from_disk`` refuses a folder without it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from sglang_capture.export.libraries import need_library
from sglang_capture.export.sharded import Written

SEAL: Final = "state.json"

LONGEST: Final = (1 << 31) - 1
"""Items that the lists of one batch may have in all: arrow counts them in 32 bits."""


def write_batches(sink: BinaryIO, features: Any, batches: Iterable[Mapping[str, Any]], format_name: str) -> None:
    """Write an arrow file, one batch after another.

    Args:
        features: the ``datasets.Features`` of the table.
        batches: for each column a list with a value for each row: a tensor, ``[T, …]`` of the column's dtype, where the
            column is one of lists, else a plain value.
    """
    arrow = need_library("pyarrow", format_name)
    schema = features.arrow_schema
    with arrow.ipc.new_stream(sink, schema) as stream:
        for batch in batches:
            columns = [_column(arrow, batch[entry.name], entry.type) for entry in schema]
            stream.write_batch(arrow.record_batch(columns, schema=schema))


def _column(arrow: Any, values: list[Any], kind: Any) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return arrow.array(values, type=kind)
    storage = getattr(kind, "storage_type", kind)
    array = _nested(arrow, torch.cat(values), [len(value) for value in values], storage)
    return array if storage is kind else arrow.ExtensionArray.from_storage(kind, array)


def _nested(arrow: Any, rows: torch.Tensor, lengths: list[int], kind: Any) -> Any:
    """``rows`` ``[N, a, b, …]`` as lists of lists …, the outermost ones of ``lengths``."""
    widths = rows.shape[1:]
    kinds = [kind]
    for _ in widths:
        kinds.append(kinds[-1].value_type)
    array = arrow.array(rows.flatten().numpy())
    for width in reversed(widths):
        offsets = torch.arange(0, len(array) + 1, width, dtype=torch.int32)
        array = arrow.ListArray.from_arrays(offsets.numpy(), array, type=kinds.pop())
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return arrow.ListArray.from_arrays(offsets.numpy(), array, type=kind)


def write_state(done: Written, features: Any, files: list[str], format_name: str) -> None:
    """Describe the table in ``files``; with this the folder can be loaded."""
    library = need_library("datasets", format_name)
    empty = library.Dataset.from_dict({name: [] for name in features}, features=features).with_format("torch")
    with tempfile.TemporaryDirectory() as scratch, _quiet(library):
        empty.save_to_disk(scratch)
        saved = {name: json.loads((Path(scratch) / name).read_bytes()) for name in ("dataset_info.json", SEAL)}
    saved[SEAL]["_data_files"] = [{"filename": file} for file in files]
    saved[SEAL]["_fingerprint"] = "".join(done.records[file].xxh3_64 for file in files)[:16]
    for name, content in saved.items():
        done.put_json(name, content)


class _quiet:  # noqa: N801  # used as a function
    """No bar for a table without rows."""

    def __init__(self, library: Any) -> None:
        self._library, self._shown = library, library.are_progress_bars_disabled()

    def __enter__(self) -> None:
        self._library.disable_progress_bars()

    def __exit__(self, *_: object) -> None:
        if not self._shown:
            self._library.enable_progress_bars()
