"""A data directory and a spool as they are after many captures, filled in seconds.

The catalog's rows, the manifest and the shards' headers agree with each other, so a service starts on them as on its
own; only the rows of the shards are holes. A dump is one real one, copied with another id of the same length.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import xxhash
from sqlalchemy import Connection, create_engine, insert, update

from benchmarks.ours import SPEC
from sglang_capture.catalog import CaptureRow, Catalog, ShardRow, pack_mask, sqlite_url
from sglang_capture.catalog.tables import CaptureState, SpecRow, TotalRow
from sglang_capture.dump import DumpFile
from sglang_capture.service.datasets import Datasets
from sglang_capture.shards.layout import build_header, shard_tensors
from sglang_capture.shards.manifest import FORMAT, FORMAT_VERSION, Manifest, ShardEntry, write_manifest
from sglang_capture.spec import CaptureSpec

SAMPLES_A_SHARD = 50
TOKENS = 400
"""Of each capture: with this spec some 23 MB, and a shard of the usual 1 GiB."""
DATASET = Datasets.default_name(SPEC.digest)
DUMP_SPEC = CaptureSpec(**{**SPEC.model_dump(), "layers": (1,), "hidden_size": 16, "num_layers": 2})
"""Of the dumps in the spool: their payload is of no interest here."""

_ROWS_AN_INSERT = 10_000
_PENDING = 64
_FAILED_OF = 100
"""One in so many captures has failed."""
_MASK = pack_mask([0] * 100 + [1] * 300)


def capture_id(number: int) -> str:
    """An id as `run` makes them: nothing that is sorted in the order in which captures become known."""
    return f"conv-{xxhash.xxh3_64_hexdigest(number.to_bytes(8, 'little'))}"


def fill(data: Path, captures: int, spooled: int) -> None:
    """A data directory with so many captures.

    Args:
        spooled: of them at most so many, and at most a tenth, wait in the spool; they have no dumps.
    """
    Catalog(sqlite_url(data / "catalog.sqlite")).close()
    states = _States(captures, min(spooled, captures // 10))
    engine = create_engine(sqlite_url(data / "catalog.sqlite"))
    with engine.begin() as connection:
        connection.execute(insert(SpecRow), [{"digest": SPEC.digest, "spec": SPEC.to_json()}])
        _insert(connection, ShardRow, _shard_rows(states.shards))
        _insert(connection, CaptureRow, (_capture_row(number, states) for number in range(captures)))
        for state, count in states.counts().items():
            held = count if state in ("spooled", "packed") else 0
            amounts = {"tokens": held * TOKENS, "size": held * TOKENS * SPEC.bytes_per_token}
            connection.execute(update(TotalRow).where(TotalRow.state == state).values(captures=count, **amounts))
    engine.dispose()
    _write_dataset(data / DATASET, states)


def fill_spool(spool: Path, dumps: int) -> None:
    """So many dumps that nobody knows of, with ids of their own."""
    name = "dump-" + "0" * 16
    template = spool / f"{name}.pt"
    DumpFile(spool / ".part-0", name, "request", DUMP_SPEC, torch.arange(8)).publish(template)
    content = template.read_bytes()
    template.unlink()
    for number in range(dumps):
        one = capture_id(number).replace("conv", "dump")
        (spool / f"{one}.pt").write_bytes(content.replace(name.encode(), one.encode()))


@dataclass(frozen=True)
class _States:
    """Which capture is in which state: the newest pending, those before them spooled, the rest packed or failed."""

    captures: int
    spooled: int

    @property
    def settled(self) -> int:
        return self.captures - self.spooled - self.pending

    @property
    def pending(self) -> int:
        return min(_PENDING, self.captures // 10)

    @property
    def packed(self) -> int:
        return self.settled - -(-self.settled // _FAILED_OF)

    @property
    def shards(self) -> int:
        return -(-self.packed // SAMPLES_A_SHARD)

    def of(self, number: int) -> CaptureState:
        if number < self.settled:
            return "packed" if number % _FAILED_OF else "failed"
        return "spooled" if number < self.settled + self.spooled else "pending"

    def place(self, number: int) -> tuple[int, int]:
        """The shard of a packed capture, and its number in there."""
        return divmod(number - number // _FAILED_OF - 1, SAMPLES_A_SHARD)

    def samples(self, shard: int) -> list[str]:
        """The ids of a shard's samples."""
        first = shard * SAMPLES_A_SHARD
        positions = range(first, min(first + SAMPLES_A_SHARD, self.packed))
        return [capture_id(position + position // (_FAILED_OF - 1) + 1) for position in positions]

    def counts(self) -> dict[CaptureState, int]:
        known: dict[CaptureState, int] = {
            "packed": self.packed,
            "failed": self.settled - self.packed,
            "spooled": self.spooled,
            "pending": self.pending,
        }
        return {state: known[state] for state in get_args(CaptureState)}


def _insert(connection: Connection, table: type[Any], rows: Iterator[dict[str, Any]]) -> None:
    while batch := list(itertools.islice(rows, _ROWS_AN_INSERT)):
        connection.execute(insert(table.__table__), batch)


def _capture_row(number: int, states: _States) -> dict[str, Any]:
    state = states.of(number)
    failed, held = state == "failed", state in ("packed", "spooled")
    shard, sample = states.place(number)
    now = time.time()
    return {
        "id": capture_id(number),
        "state": state,
        "tokens": TOKENS if held else None,
        "bytes": TOKENS * SPEC.bytes_per_token if held else None,
        "spec_digest": SPEC.digest,
        "request_digest": f"{number:032x}",
        "sent": f"ids-{number:032x}",
        "mask_tokens": TOKENS,
        "loss_mask": _MASK if state in ("spooled", "pending") else None,
        "metadata": {"source": "benchmark", "row": number},
        "failure": "timeout" if failed else None,
        "reason": "nothing appeared in the spool within 30 s of the engine's answer" if failed else None,
        "retriable": failed,
        "shard_seq": shard + 1 if state == "packed" else None,
        "sample": sample if state == "packed" else None,
        "created": now,
        "updated": now,
    }


def _shard_rows(shards: int) -> Iterator[dict[str, Any]]:
    for number in range(shards):
        yield {
            "seq": number + 1,
            "dataset": DATASET,
            "name": _shard_name(number),
            "spec_digest": SPEC.digest,
            "samples": SAMPLES_A_SHARD,
            "tokens": SAMPLES_A_SHARD * TOKENS,
            "bytes": 1 << 30,
            "created": time.time(),
        }


def _write_dataset(dataset: Path, states: _States) -> None:
    dataset.mkdir()
    entries = tuple(write_hollow_shard(dataset, number, states.samples(number)) for number in range(states.shards))
    write_manifest(dataset, Manifest.new(SPEC).model_copy(update={"shards": entries}))


def write_hollow_shard(dataset: Path, number: int, ids: list[str]) -> ShardEntry:
    """A shard with its header and offsets; the rest of the file takes no room."""
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "spec_digest": SPEC.digest,
        "spec": SPEC.to_json(),
        "sample_ids": json.dumps(ids),
    }
    header, size = build_header(shard_tensors(SPEC, len(ids), len(ids) * TOKENS), metadata)
    with (dataset / _shard_name(number)).open("wb") as file:
        file.write(header)
        file.write((torch.arange(len(ids) + 1) * TOKENS).numpy().tobytes())
        file.truncate(size)
    return ShardEntry(
        file=_shard_name(number), bytes=size, samples=len(ids), tokens=len(ids) * TOKENS, xxh3_64="0" * 16
    )


def _shard_name(number: int) -> str:
    return f"shard-{number:06d}.safetensors"
