"""What can be verified: a dataset, a spool, one dump, or an export of ours, all seen as dumps with an id."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_capture import spool
from sglang_capture.dump import Dump, DumpError, load_dump
from sglang_capture.errors import CaptureError
from sglang_capture.export import ExportError, get_exporter
from sglang_capture.export.files import FileExporter
from sglang_capture.export.folder import FileRecord, Lineage, read_lineage, read_records
from sglang_capture.shards import CaptureDataset
from sglang_capture.shards.manifest import MANIFEST_NAME


class SourceError(CaptureError):
    """A place that holds no captures, or one that cannot be read."""


@dataclass(frozen=True)
class Source:
    """Captures by id; ``load`` maps one, and raises :class:`CaptureError` if it is damaged."""

    ids: Sequence[str]
    load: Callable[[str], Dump]

    def choose(self, count: int, seed: int) -> list[str]:
        """``count`` ids, or all if there are fewer; the same ones for the same seed."""
        return random.Random(seed).sample(sorted(self.ids), min(count, len(self.ids)))


def open_source(path: Path) -> Source:
    """Tell what ``path`` is by what it holds.

    Raises:
        SourceError: it is none of the things above.
        CaptureError: it is one, and damaged.
    """
    if (path / MANIFEST_NAME).exists():
        return _dataset(path)
    if lineage := read_lineage(path):
        return _export(path, lineage)
    if path.is_dir():
        dumps = {dump.stem: dump for dump in spool.dumps(path)}
        if dumps:
            return Source(list(dumps), lambda capture_id: _load_dump(dumps[capture_id]))
    elif path.suffix == spool.DUMP_SUFFIX:
        return Source([path.stem], lambda _: _load_dump(path))
    raise SourceError(
        f"{path} holds no captures: expected a dataset ({MANIFEST_NAME}), a spool or a dump (.pt), or an export"
    )


def _dataset(path: Path) -> Source:
    dataset = CaptureDataset(path, rank=0, world_size=1)

    def load(sample_id: str) -> Dump:
        sample = dataset.by_id(sample_id)
        return Dump(
            capture_id=sample_id,
            request_id="",
            spec=dataset.spec,
            input_ids=sample["input_ids"],
            hidden_states=sample["hidden_states"],
            last_hidden={key: sample[key] for key in dataset.spec.last_hidden_keys},
        )

    return Source(dataset.ids, load)


def _load_dump(path: Path) -> Dump:
    try:
        return load_dump(path)
    except FileNotFoundError:
        raise SourceError(f"{path} is gone, packed or deleted meanwhile: verify the dataset instead") from None
    except DumpError as error:
        raise SourceError(f"{error}: capture it again") from error


def _export(path: Path, lineage: Lineage) -> Source:
    exporter = get_exporter(lineage.format)
    if not isinstance(exporter, FileExporter):
        raise ExportError(f"an export for {lineage.format} cannot be verified by itself: verify the dataset instead")
    records: dict[str, FileRecord] = {record.sample_id: record for record in read_records(path).values()}

    def load(sample_id: str) -> Dump:
        file = path / records[sample_id].file
        try:
            content = torch.load(file, weights_only=True, mmap=True)
            return exporter.decode(content, sample_id, lineage.spec)
        except Exception as error:  # whatever torch.load and the tensors' shapes raise
            raise SourceError(f"{file} is not what was exported ({error}): run the export again") from error

    return Source(list(records), load)
