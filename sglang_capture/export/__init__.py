"""Exports: what each trainer reads, written from a dataset.

A new format is a module here and an entry in ``_EXPORTERS``.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from sglang_capture.errors import UsageError
from sglang_capture.export.angelslim import AngelSlimEagle3
from sglang_capture.export.angelslim_dflash import AngelSlimDFlash
from sglang_capture.export.automodel_dspark import AutomodelDSpark
from sglang_capture.export.automodel_eagle3 import AutomodelEagle3
from sglang_capture.export.base import (
    Exporter,
    ExportError,
    ExportSummary,
    ExportUsageError,
    Progress,
    SkippedSample,
)
from sglang_capture.export.eagle import Eagle
from sglang_capture.export.huggingface import HuggingFace
from sglang_capture.export.modelopt import ModelOpt
from sglang_capture.export.options import NO_OPTIONS, ExportOptions, flag
from sglang_capture.export.specforge import SpecForgeEagle3
from sglang_capture.export.specforge_dflash import SpecForgeDFlash
from sglang_capture.export.specforge_dspark import SpecForgeDSpark
from sglang_capture.export.speculators import Speculators
from sglang_capture.export.tensors import SafeTensors
from sglang_capture.export.torchspec import TorchSpec
from sglang_capture.export.webdataset import WebDataset
from sglang_capture.shards import CaptureDataset, check_dataset

__all__ = [
    "ExportError",
    "ExportOptions",
    "ExportSummary",
    "ExportUsageError",
    "Exporter",
    "SkippedSample",
    "export_dataset",
    "exporters",
    "get_exporter",
]

_EXPORTERS: Final[tuple[Exporter, ...]] = (
    SpecForgeEagle3(),
    SpecForgeDFlash(),
    SpecForgeDSpark(),
    ModelOpt(),
    AngelSlimEagle3(),
    AngelSlimDFlash(),
    Eagle(),
    TorchSpec(),
    SafeTensors(),
    Speculators(),
    AutomodelEagle3(),
    AutomodelDSpark(),
    WebDataset(),
    HuggingFace(),
)

_NEAR: Final = 0.5
"""How like a name must be to one that is not known, from 0 to 1, to be offered in its place."""

_ALIASES: Final = {"specforge-eagle3": "specforge"}


def exporters() -> tuple[Exporter, ...]:
    """Every exporter there is."""
    return _EXPORTERS


def get_exporter(name: str) -> Exporter:
    """The exporter of that name, or of a name it also goes by.

    Raises:
        UsageError: there is none; the message lists the names there are, a line each.
    """
    for exporter in _EXPORTERS:
        if exporter.name == _ALIASES.get(name, name):
            return exporter
    raise UsageError(_unknown(name))


def _unknown(name: str) -> str:
    """What to say of a format that is none: the one that may be meant, then all, the nearest first."""
    descriptions = {exporter.name: exporter.description for exporter in _EXPORTERS}
    near = get_close_matches(name.lower(), descriptions, n=len(descriptions), cutoff=_NEAR)
    width = max(map(len, descriptions))
    lines = [f"  {known:<{width}}  {descriptions[known]}" for known in dict.fromkeys([*near, *descriptions])]
    question = f": did you mean {near[0]}?" if near else "."
    return "\n".join([f"unknown export format {name!r}{question} The formats are", *lines])


def export_dataset(
    dataset_path: Path,
    to: str,
    out: Path,
    *,
    ids: Iterable[str] | None = None,
    options: ExportOptions = NO_OPTIONS,
    progress: Progress = lambda done, total: None,
) -> ExportSummary:
    """Write a dataset, or the samples ``ids`` of it, in a trainer's format; an interrupted export goes on.

    Raises:
        UsageError: the format or a sample id is unknown, or the format does not take an option.
        ExportUsageError: an option is missing or cannot be, or ``out`` holds something else.
        ExportError: the format cannot hold these captures, or ``out`` cannot be written.
        DatasetError: the dataset cannot be read, or a shard is not what its checksum says.
    """
    exporter = get_exporter(to)
    _check_options(exporter, options)
    check_dataset(dataset_path, deep=True)
    dataset = CaptureDataset(dataset_path, rank=0, world_size=1)
    exporter.check(dataset.spec, options)
    rows = _rows(dataset, ids)
    if not rows:
        raise ExportUsageError(
            f"nothing to export: {dataset_path} holds {len(dataset)} samples, and none was asked for"
        )
    return exporter.export(dataset, out, rows, options, progress)


def _check_options(exporter: Exporter, options: ExportOptions) -> None:
    for option in sorted(options.given - exporter.options):
        takers = ", ".join(other.name for other in _EXPORTERS if option in other.options)
        raise UsageError(f"{exporter.name} takes no {flag(option)}; formats that do: {takers or 'none'}")


def _rows(dataset: CaptureDataset, ids: Iterable[str] | None) -> list[int]:
    if ids is None:
        return list(range(len(dataset)))
    places = {sample_id: row for row, sample_id in enumerate(dataset.ids)}
    wanted = list(dict.fromkeys(ids))
    if unknown := [sample_id for sample_id in wanted if sample_id not in places]:
        shown = ", ".join(unknown[:5]) + (" …" if len(unknown) > 5 else "")
        raise UsageError(f"{len(unknown)} of {len(wanted)} sample ids are not in {dataset.path}: {shown}")
    return sorted(places[sample_id] for sample_id in wanted)
