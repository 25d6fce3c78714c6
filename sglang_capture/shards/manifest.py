"""The manifest of a dataset: what is in it, and the checksums that vouch for it.

::

    <dataset>/manifest.json             this
    <dataset>/shard-000000.safetensors  packed samples, one spec for all of them (layout.py)
    <dataset>/.lock                     held by the one writer

A shard belongs to the dataset from the moment the manifest names it. The manifest is replaced as a whole, so a reader
sees a dataset before a shard was added or after, and nothing in between.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.spec import CaptureSpec

FORMAT: Final = "sglang-capture-dataset"
FORMAT_VERSION: Final = 1
"""The newest version this release reads, and the one it writes."""

MANIFEST_NAME: Final = "manifest.json"


class DatasetError(CaptureError):
    """A dataset that cannot be read or written; the message names the file and says what to do."""


class NoDatasetError(DatasetError, UsageError):
    """A place that was named as a dataset and holds none."""


class SpecMismatch(DatasetError, UsageError):  # noqa: N818 - a name of the interface
    """Captures that may not stand in one dataset, with the fields in which they differ."""


class ShardEntry(BaseModel):
    """One shard, as the manifest names it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    file: str = Field(pattern=r"^shard-\d{6,}\.safetensors$")
    bytes: int = Field(gt=0, description="size of the file")
    samples: int = Field(gt=0)
    tokens: int = Field(gt=0)
    xxh3_64: str = Field(pattern=r"^[0-9a-f]{16}$", description="of the whole file")
    prompt_lineages: tuple[dict[str, Any], ...] = Field(
        default=(), description="the different `prompt_lineage` of its samples: what made their ids and masks"
    )

    @cached_property
    def lineages_by_key(self) -> dict[str, dict[str, Any]]:
        """Made once for each shard: a manifest is written with each new one, and may name tens of thousands."""
        return {_key(lineage): lineage for lineage in self.prompt_lineages}


class Manifest(BaseModel):
    """The content of ``manifest.json``; the totals are computed from the shards, so they cannot disagree with them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal["sglang-capture-dataset"] = FORMAT
    format_version: int = Field(default=FORMAT_VERSION, ge=1)
    dataset_id: str = Field(description="random, made once: tells this dataset from any other, wherever it is copied")
    created: str = Field(description="ISO 8601, UTC")
    spec: CaptureSpec
    spec_digest: str = Field(description="CaptureSpec.digest, also in every shard's header")
    shards: tuple[ShardEntry, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def prompt_lineages(self) -> tuple[dict[str, Any], ...]:
        """The different ones of all shards: more than one tell of a template that changed on the way."""
        found: dict[str, dict[str, Any]] = {}
        for shard in self.shards:
            found.update(shard.lineages_by_key)
        return tuple(found.values())

    @classmethod
    def new(cls, spec: CaptureSpec) -> Manifest:
        """The manifest of a dataset without shards."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(dataset_id=uuid4().hex, created=created, spec=spec, spec_digest=spec.digest)

    def with_shard(self, entry: ShardEntry) -> Manifest:
        return self.model_copy(update={"shards": (*self.shards, entry)})


def _instead(directory: Path) -> str:
    """What to name: the folder of a side service holds its datasets one level down."""
    inside = sorted(path.parent.name for path in directory.glob(f"*/{MANIFEST_NAME}"))
    if not inside:
        return "Give the directory that the side service or `sglang-capture pack` wrote"
    return f"Give one of those in it: {', '.join(inside[:5])}{' …' if len(inside) > 5 else ''}"


def read_manifest(dataset: Path) -> Manifest:
    """The manifest of the dataset at ``dataset``.

    Raises:
        DatasetError: there is none, it is damaged, or a newer release wrote it.
    """
    path = dataset / MANIFEST_NAME
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise NoDatasetError(
            f"{dataset} is no dataset: expected {MANIFEST_NAME} in it, found none. {_instead(dataset)}"
        ) from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read ({error}): restore it from a copy") from error
    _check_version(path, content)
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise DatasetError(f"{path} is not a manifest of this format: {faults}") from error


def write_manifest(dataset: Path, manifest: Manifest) -> None:
    """Replace the manifest; :func:`sync_directory` makes that durable.

    Raises:
        OSError: it cannot be written; the one that was there stands.
    """
    path = dataset / MANIFEST_NAME
    temporary = path.with_name(f".{MANIFEST_NAME}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(manifest.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def distinct(lineages: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Each lineage once, in the order of their first appearance."""
    return tuple({_key(lineage): lineage for lineage in lineages}.values())


def _key(lineage: dict[str, Any]) -> str:
    return sys.intern(json.dumps(lineage, sort_keys=True))


def sync_directory(directory: Path) -> None:
    """Make renames in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_version(path: Path, content: object) -> None:
    """Tell a newer format by its version alone, before anything else of it is understood."""
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DatasetError(
            f"{path} is of format version {version}, and this release reads versions up to {FORMAT_VERSION}: "
            "upgrade sglang-capture"
        )
