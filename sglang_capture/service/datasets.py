"""The datasets below the data directory, and the catalog brought to agree with their manifests.

::

    <data>/catalog.sqlite
    <data>/dataset-<first 8 digits of the spec digest>/    one for each spec, unless a client names another
    <data>/jobs/<job id>.jsonl                             the rows of a job, until it ends
    <data>/exports/

A sample belongs to a dataset from the moment the manifest names its shard: whatever the service died over afterwards
(recording it, removing the dump) is made up for at the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from sglang_capture.catalog import Catalog, SampleFacts, ShardRow
from sglang_capture.mark import is_capture_id
from sglang_capture.service.problems import ProblemError
from sglang_capture.shards import DatasetError, DatasetWriter, ShardEntry, read_manifest
from sglang_capture.shards.manifest import MANIFEST_NAME
from sglang_capture.shards.reader import Shard
from sglang_capture.spec import CaptureSpec

RESERVED = frozenset({"exports", "jobs"})
"""Names below the data directory that no dataset may have."""

_log = logging.getLogger(__name__)


class Datasets:
    """Finds, opens and records the datasets of one data directory. Its methods block."""

    def __init__(self, data: Path, catalog: Catalog):
        self.data = data
        self._catalog = catalog
        self._writers: dict[str, DatasetWriter] = {}

    @staticmethod
    def default_name(spec_digest: str) -> str:
        """The dataset that captures of a spec go to by themselves."""
        return f"dataset-{spec_digest[:8]}"

    def path(self, name: str) -> Path:
        """Where the dataset ``name`` is, or would be.

        Raises:
            ProblemError: the name cannot be a dataset's.
        """
        if not is_capture_id(name) or name in RESERVED or name.startswith("catalog.sqlite"):
            raise ProblemError(
                "invalid-request",
                f"a dataset's name has the characters of a capture id and is none of {', '.join(sorted(RESERVED))}; "
                f"found {name!r:.80}",
            )
        return self.data / name

    def existing(self, name: str) -> Path:
        """Where the dataset ``name`` is.

        Raises:
            ProblemError: there is none, or the name cannot be a dataset's.
        """
        path = self.path(name)
        if not (path / MANIFEST_NAME).is_file():
            there = ", ".join(sorted(found.name for found in self._all())) or "none yet"
            raise ProblemError("unknown-dataset", f"there is no dataset {name} in {self.data}; there are: {there}")
        return path

    def writer(self, name: str, spec: CaptureSpec) -> DatasetWriter:
        """The writer of a dataset; it stays open, and keeps others out, as long as the service runs.

        Raises:
            SpecMismatch: the dataset is there and holds captures of another spec.
            DatasetError: it cannot be written.
        """
        writer = self._writers.get(name)
        if writer is None:
            writer = self._writers[name] = DatasetWriter(self.path(name), spec)
        return writer

    def record(self, name: str, entry: ShardEntry) -> ShardRow:
        """Record a shard as its own header describes it, and its samples as packed.

        Raises:
            DatasetError: the shard cannot be read.
        """
        path = self.path(name)
        shard = Shard(path, entry)
        spec = CaptureSpec.from_json(shard.layout.metadata["spec"])
        tokens = shard.offsets.diff().tolist()
        samples = [
            SampleFacts(sample_id, count, metadata)
            for sample_id, count, metadata in zip(shard.ids, tokens, shard.metadata, strict=True)
        ]
        return self._catalog.shards.record(name, entry.file, spec, size=entry.bytes, samples=samples)

    def has(self, shard: ShardRow) -> bool:
        """Whether the file of a recorded shard is there."""
        return (self.data / shard.dataset / shard.name).is_file()

    def reconcile(self) -> list[str]:
        """Bring the catalog to agree with the manifests; returns what could not be read.

        Shards that the catalog does not know are recorded, and captures whose shard is gone are failed, so that they
        can be captured again.
        """
        problems = []
        known = self._catalog.shards.names()
        found: set[tuple[str, str]] = set()
        unread: set[str] = set()
        for path in self._all():
            try:
                for entry in read_manifest(path).shards:
                    found.add((path.name, entry.file))
                    if (path.name, entry.file) not in known:
                        self.record(path.name, entry)
            except DatasetError as error:
                unread.add(path.name)
                problems.append(str(error))
        for name in {name for name, _ in known - found} - unread:
            gone = sorted(file for dataset, file in known - found if dataset == name)
            lost = self._catalog.shards.lose(name, gone)
            _log.warning(
                "%d shards are gone from the dataset %s, and with them %d captures", len(gone), name, len(lost)
            )
        return problems

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _all(self) -> Iterator[Path]:
        return (path.parent for path in sorted(self.data.glob(f"*/{MANIFEST_NAME}")) if is_capture_id(path.parent.name))
