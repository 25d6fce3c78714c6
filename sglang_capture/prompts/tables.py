"""Rows from tables: parquet files, and datasets of Hugging Face's library, on disk or on the Hub.

Both come with ``pip install 'sglang-capture[data]'``, and are imported only when such a source is named.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.names import find

_BATCH = 256


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, read a batch at a time. Raises as :func:`parquet_count`."""
    for batch in _open_parquet(path).iter_batches(batch_size=_BATCH):
        yield from batch.to_pylist()


def parquet_count(path: Path) -> int:
    """How many rows a parquet file has.

    Raises:
        CaptureError: the library is not installed.
        UsageError: it cannot be read.
    """
    return int(_open_parquet(path).metadata.num_rows)


def load_saved(path: Path, split: str | None) -> Any:
    """What ``save_to_disk`` wrote into a directory; else what ``load_dataset`` finds in it (parquet files, say).

    Raises:
        CaptureError: the library is not installed.
        UsageError: it cannot be read, or has several splits of which none is named.
    """
    if not any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        return load_hub(str(path), None, split)
    datasets = _import("datasets")
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # of the library, of arrow, of the file system
        raise UsageError(f"the dataset {path} cannot be read: {error}") from error
    return _one_split(found, str(path), split)


def load_hub(name: str, subset: str | None, split: str | None) -> Any:
    """A dataset of the Hub, read while it is used, with nothing kept on disk. Raises as :func:`load_saved`."""
    datasets = _import("datasets")
    find(name, "FILE", "dataset")
    try:
        found = datasets.load_dataset(name, subset, split=split, streaming=True)
    except Exception as error:  # of the library, of the Hub, of the network
        raise UsageError(
            f"the dataset {name} cannot be loaded: {str(error).strip() or type(error).__name__}"
        ) from error
    return _one_split(found, name, split)


def dataset_rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """The rows of a dataset as Python objects, whatever format it is set to."""
    for row in dataset.with_format(None):
        yield dict(row)


def dataset_count(dataset: Any) -> int | None:
    """How many rows a dataset has; ``None`` where that is only known at its end."""
    if hasattr(dataset, "__len__"):
        return len(dataset)
    splits = dataset.info.splits or {}
    known = splits.get(str(dataset.split)) if dataset.split is not None else None
    return (known.num_examples or None) if known is not None else None


def _one_split(found: Any, name: str, split: str | None) -> Any:
    if not isinstance(found, dict):
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split in found:
        return found[split]
    asked = "none is named" if split is None else f"there is no {split}"
    raise UsageError(f"{name} has the splits {', '.join(found)}, and {asked}: name one with --split")


def _open_parquet(path: Path) -> Any:
    parquet = _import("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # arrow's errors have no common class
        raise UsageError(f"{path} cannot be read: {error}; name a parquet file") from error


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise CaptureError(
            "reading parquet files and Hugging Face datasets needs a library: pip install 'sglang-capture[data]'"
        ) from None
