"""The one dataset that every trainer gets, and its exports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang_capture.export import ExportSummary, export_dataset
from sglang_capture.export.options import ExportOptions
from trainers.data import Truth, make_data, make_model

Export = Callable[..., tuple[Path, ExportSummary]]


@dataclass(frozen=True)
class Captures:
    """The dataset, the model it is of, and what is in it."""

    model: Path
    dataset: Path
    truths: list[Truth]


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Captures:
    folder = tmp_path_factory.mktemp("captures")
    make_model(folder / "model")
    return Captures(folder / "model", folder / "dataset", make_data(folder / "model", folder / "dataset"))


FEW = 4
"""Samples to learn by heart: all of them in each step, so that the losses of steps can be compared."""


@pytest.fixture(scope="session")
def export(captures: Captures, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """The dataset in a format, or the first few samples of it; written once, with what the export said."""
    done: dict[Any, tuple[Path, ExportSummary]] = {}

    def written(to: str, *, few: bool = False, **options: Any) -> tuple[Path, ExportSummary]:
        key = to, few, *sorted(options.items())
        if key not in done:
            out = tmp_path_factory.mktemp(to) / "export"
            ids = [truth.sample_id for truth in captures.truths[:FEW]] if few else None
            done[key] = out, export_dataset(captures.dataset, to, out, ids=ids, options=ExportOptions(**options))
        return done[key]

    return written
