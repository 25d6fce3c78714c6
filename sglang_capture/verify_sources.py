"""What can be verified: a dataset, a spool, one dump, or an export of ours, all seen as dumps with an id."""

from __future__ import annotations

from pathlib import Path

from sglang_capture import spool
from sglang_capture.dump import LABELS, Dump, DumpError, load_dump
from sglang_capture.export import get_exporter
from sglang_capture.export.folder import read_lineage
from sglang_capture.shards import CaptureDataset
from sglang_capture.shards.manifest import MANIFEST_NAME
from sglang_capture.source import NoSourceError, Source, SourceError


def open_source(path: Path) -> Source:
    """Tell what ``path`` is by what it holds.

    Raises:
        NoSourceError: it is none of the things above.
        CaptureError: it is one, and damaged.
    """
    if lineage := read_lineage(path):  # asked first: a trainer's format may have a manifest of that name too
        return get_exporter(lineage.format).read(path, lineage)
    if (path / MANIFEST_NAME).exists():
        return _dataset(path)
    if path.is_dir():
        dumps = {dump.stem: dump for dump in spool.dumps(path)}
        if dumps:
            return Source(list(dumps), lambda capture_id: _load_dump(dumps[capture_id]))
    elif path.suffix == spool.DUMP_SUFFIX:
        return Source([path.stem], lambda _: _load_dump(path))
    raise NoSourceError(
        f"{path} holds no captures: expected a dataset ({MANIFEST_NAME}), a spool or a dump (.pt), or an export"
    )


def _dataset(path: Path) -> Source:
    dataset = CaptureDataset(path, rank=0, world_size=1)
    places = {sample_id: place for place, sample_id in enumerate(dataset.ids)}

    def load(sample_id: str) -> Dump:
        sample, metadata = dataset.by_id(sample_id), dataset.metadata(places[sample_id])
        return Dump(
            capture_id=sample_id,
            request_id="",
            spec=dataset.spec,
            input_ids=sample["input_ids"],
            hidden_states=sample["hidden_states"],
            last_hidden={key: sample[key] for key in dataset.spec.last_hidden_keys},
            **{key: int(metadata.get(key, 0)) for key in LABELS},
        )

    return Source(dataset.ids, load)


def _load_dump(path: Path) -> Dump:
    try:
        return load_dump(path)
    except FileNotFoundError:
        raise SourceError(f"{path} is gone, packed or deleted meanwhile: verify the dataset instead") from None
    except DumpError as error:
        raise SourceError(f"{error}: capture it again") from error
