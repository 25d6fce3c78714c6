"""Packing a spool into a dataset without a service: for dumps that were kept, or made on another machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sglang_capture import spool
from sglang_capture.claim import service_on
from sglang_capture.dump import Dump, DumpError, load_dump
from sglang_capture.errors import UsageError
from sglang_capture.shards import CaptureDataset, DatasetWriter, Sample, SampleError, ShardEntry, check_sample
from sglang_capture.slabs import hand_back
from sglang_capture.spec import CaptureSpec

MOST_SAMPLES = 4096
"""Samples of one shard at most: each one's dump is mapped meanwhile, and a process may have some 65,000 mappings."""

Progress = Callable[[int, int], None]
"""Called with the dumps done and the dumps in all."""


@dataclass
class PackSummary:
    """What a pack did."""

    shards: list[ShardEntry] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    """Captures that the dataset had, row for row the same."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Captures that were left out, and why."""

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)


def pack_spool(
    directory: Path,
    dataset: Path,
    *,
    ids: Sequence[str] | None = None,
    most_bytes: int = 1 << 30,
    remove: bool = False,
    progress: Progress = lambda done, total: None,
) -> PackSummary:
    """Pack the dumps in ``directory`` (or those of ``ids``) into ``dataset``, which is made if it is not there.

    Packing again after an interruption goes on: what the dataset has, it keeps.

    Args:
        most_bytes: payload of one shard at most.
        remove: remove each dump once its shard is part of the dataset; by default all are kept.

    Raises:
        UsageError: a side service reads there, there is no dump, an id has none, or the dumps were captured under
            several specs.
        DatasetError: the dataset holds captures of another spec, or cannot be written.
    """
    if (service := service_on(directory)) is not None:
        raise UsageError(
            f"a side service (process {service}) reads the spool {directory} and packs it by itself: leave it to that, "
            "or stop it first"
        )
    paths = _paths(directory, ids)
    summary = PackSummary()
    spec = _one_spec(paths, summary)
    if spec is None:
        return summary
    with DatasetWriter(dataset, spec) as writer:
        there = CaptureDataset(dataset, rank=0, world_size=1)
        for batch in _batches(paths, most_bytes, summary):
            _write(batch, writer, there, summary)
            done = [(s.sample_id, s.dump.inode) for s in batch if s.sample_id not in summary.skipped]
            batch.clear()  # with the last references go the mappings, before the pages are another's
            for sample_id, inode in done if remove else ():
                hand_back(directory, sample_id, inode)
            progress(summary.samples + len(summary.already) + len(summary.skipped), len(paths))
    return summary


def _paths(directory: Path, ids: Sequence[str] | None) -> list[Path]:
    if not directory.is_dir():
        raise UsageError(f"there is no spool at {directory}: name the directory that holds the .pt files")
    if ids is None:
        found = sorted(spool.dumps(directory))
    else:
        found = [spool.dump_path(directory, capture_id) for capture_id in dict.fromkeys(ids)]
        if missing := [path.name for path in found if not path.exists()]:
            raise UsageError(f"{directory} has no {', '.join(missing[:10])}")
    if not found:
        raise UsageError(f"{directory} holds no dump (no file named <capture id>.pt)")
    return found


def _one_spec(paths: Sequence[Path], summary: PackSummary) -> CaptureSpec | None:
    """The spec of all readable dumps; ``None`` if none is readable."""
    specs: dict[str, CaptureSpec] = {}
    names: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        if dump := _load(path, summary):
            specs.setdefault(dump.spec.digest, dump.spec)
            names[dump.spec.digest].append(dump.capture_id)
    if len(specs) > 1:
        first, *others = specs.values()
        lines = [
            f"{len(names[digest])} like {names[digest][0]}: layers {list(specs[digest].layers)}, "
            f"last hidden {specs[digest].last_hidden}, {specs[digest].model_path}"
            for digest in specs
        ]
        differences = dict.fromkeys(line for other in others for line in first.differences(other))
        raise UsageError(
            f"the dumps have {len(specs)} different specs, and a dataset holds one ({'; '.join(differences)}). "
            f"Found {'; '.join(lines)}. Pack each into a dataset of its own with --id"
        )
    return next(iter(specs.values()), None)


def _load(path: Path, summary: PackSummary) -> Dump | None:
    try:
        dump = load_dump(path)
        check_sample(Sample(path.name.removesuffix(spool.DUMP_SUFFIX), dump), dump.spec)
        return dump
    except FileNotFoundError:
        summary.skipped[path.name.removesuffix(spool.DUMP_SUFFIX)] = "its dump vanished meanwhile"
    except (DumpError, SampleError) as error:
        summary.skipped[path.name.removesuffix(spool.DUMP_SUFFIX)] = str(error)
    return None


def _batches(paths: Sequence[Path], most_bytes: int, summary: PackSummary) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    size = 0
    for path in paths:
        dump = _load(path, summary)
        if dump is None:
            continue
        payload = dump.tokens * dump.spec.bytes_per_token
        if batch and (size + payload > most_bytes or len(batch) >= MOST_SAMPLES):
            yield batch
            batch, size = [], 0
        batch.append(Sample(path.name.removesuffix(spool.DUMP_SUFFIX), dump))
        size += payload
    if batch:
        del dump  # who removes the dumps of a batch must be the last to hold them
        yield batch


def _write(batch: list[Sample], writer: DatasetWriter, there: CaptureDataset, summary: PackSummary) -> None:
    new = [sample for sample in batch if _is_new(sample, writer, there, summary)]
    if new:
        summary.shards.append(writer.write_shard(new))


def _is_new(sample: Sample, writer: DatasetWriter, there: CaptureDataset, summary: PackSummary) -> bool:
    """Whether the dataset lacks a sample. One that it has is compared, not taken on its name's word."""
    if writer.shard_of(sample.sample_id) is None:
        return True
    dump, packed = sample.dump, there.by_id(sample.sample_id)
    mine = {"input_ids": dump.input_ids, "hidden_states": dump.hidden_states, **dump.last_hidden}
    # By their bytes: NaN, which a labelled capture may hold, equals nothing.
    if all(torch.equal(packed[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in mine.items()):
        summary.already.append(sample.sample_id)
    else:
        summary.skipped[sample.sample_id] = f"{there.path} has another capture of this id"
    return False
