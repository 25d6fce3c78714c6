"""One shard: from spooled captures to a file that the manifest names, to freed memory. Blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_capture.catalog import CaptureRow, Catalog, DumpFacts, ShardRow, is_record_of, unpack_mask
from sglang_capture.dump import DumpError
from sglang_capture.service.datasets import Datasets
from sglang_capture.service.problems import ProblemError
from sglang_capture.service.spooled import read_spooled
from sglang_capture.shards import Sample, SampleError, SpecMismatch, check_sample
from sglang_capture.slabs import hand_back
from sglang_capture.spec import CaptureSpec

_log = logging.getLogger(__name__)


class ShardPacking:
    """Packs spooled captures of one spec, a shard at a time.

    The order of the steps is what makes it safe to die at any point: the shard is written, renamed and named by the
    manifest; then the catalog says that its captures are packed; then their dumps are removed.

    Args:
        most_bytes, most_samples: what one shard holds at most; each sample's dump is mapped while it is written, and a
            process may have some 65,000 mappings.
    """

    def __init__(self, spool_dir: Path, catalog: Catalog, datasets: Datasets, most_bytes: int, most_samples: int):
        self._spool = spool_dir
        self._catalog = catalog
        self._datasets = datasets
        self._most_bytes = most_bytes
        self._most_samples = most_samples

    def pack_next(
        self, spec_digest: str, *, dataset: str | None = None, ids: Sequence[str] | None = None
    ) -> ShardRow | None:
        """Pack as much as one shard holds; ``None`` when nothing of the spec (and of ``ids``) is spooled any more.

        Raises:
            ProblemError: the dataset holds captures of another spec (``mixed-specs``).
            DatasetError: the shard cannot be written; everything is as it was.
        """
        name = dataset or self._datasets.default_name(spec_digest)
        while rows := self._take(spec_digest, ids):
            if samples := self._load(rows):
                done = [(sample.sample_id, sample.dump.inode) for sample in samples]
                recorded = self._write(name, samples)
                samples.clear()  # with the last references go the mappings, before the pages are another's
                for sample_id, inode in done:
                    hand_back(self._spool, sample_id, inode)
                return recorded
        return None

    def _take(self, spec_digest: str, ids: Sequence[str] | None) -> list[CaptureRow]:
        return self._catalog.captures.spooled(
            spec_digest, limit=self._most_samples, most_bytes=self._most_bytes, ids=ids
        )

    def _load(self, rows: Sequence[CaptureRow]) -> list[Sample]:
        """The samples of ``rows``, mapped and checked; what cannot be a sample is recorded as failed.

        A dump that is not the one its record is of stays in the spool, and is recorded anew.
        """
        samples: list[Sample] = []
        strangers: list[DumpFacts] = []
        for row in rows:
            try:
                dump, facts = read_spooled(self._spool, row.id)
                if not is_record_of(row, facts):
                    strangers.append(facts)
                    continue
                mask = None if row.loss_mask is None else torch.from_numpy(unpack_mask(row.loss_mask))
                sample = Sample(row.id, dump, mask, row.meta)
                check_sample(sample, dump.spec)
                samples.append(sample)
            except FileNotFoundError:
                reason = "its dump vanished from the spool before it was packed"
                self._catalog.captures.lose([row.id], "vanished", reason)
            except (DumpError, SampleError) as error:
                self._catalog.captures.lose([row.id], "unreadable", str(error))
        if strangers:
            self._record_anew(strangers)
        return samples

    def _record_anew(self, strangers: Sequence[DumpFacts]) -> None:
        """Make records those of the dumps that lie there now; what is refused the next scan of the spool removes."""
        for facts in strangers:
            _log.warning("another dump of %s lies in %s than was recorded: it is recorded anew", facts.id, self._spool)
        self._catalog.captures.record_dumps(strangers)

    def _write(self, name: str, samples: Sequence[Sample]) -> ShardRow:
        spec = samples[0].dump.spec
        try:
            writer = self._datasets.writer(name, spec)
        except SpecMismatch as error:
            raise ProblemError("mixed-specs", str(error)) from error
        if differences := writer.manifest.spec.differences(spec):
            raise mixed(name, differences)
        new = [sample for sample in samples if writer.shard_of(sample.sample_id) is None]
        if new:
            writer.write_shard(new)
        # Usually the shard just written. Others come back here when the catalog could not record them the first time.
        files = {writer.shard_of(sample.sample_id) for sample in samples}
        recorded = [self._datasets.record(name, entry) for entry in writer.manifest.shards if entry.file in files]
        return recorded[-1]


def mixed(name: str, differences: Sequence[str]) -> ProblemError:
    """The problem of captures that may not stand in the dataset ``name``."""
    return ProblemError(
        "mixed-specs",
        f"captures of different specs may not stand in one dataset ({name}): {'; '.join(differences)}. "
        "Name captures of one spec, or no dataset: then each spec goes to its own",
        differences=list(differences),
    )


def differing(specs: Sequence[CaptureSpec]) -> list[str]:
    """In what a list of specs differs from its first, each difference once."""
    return list(dict.fromkeys(line for other in specs[1:] for line in specs[0].differences(other)))
