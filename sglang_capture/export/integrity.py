"""Is an export as it was written? Every file against its record."""

from __future__ import annotations

from pathlib import Path

from sglang_capture.export.base import ExportError
from sglang_capture.export.folder import FileRecord, read_records
from sglang_capture.shards.check import checksum


def check_export(out: Path) -> list[FileRecord]:
    """Read every byte of what an export has written, and compare its length and its xxh3-64; the records.

    Raises:
        ExportError: with one line for each file that is gone or was changed.
    """
    records = list(read_records(out).values())
    faults = [fault for record in records if (fault := _fault(out, record))]
    if faults:
        raise ExportError("\n".join((*faults, "run the same export again: it writes these anew, and keeps the others")))
    return records


def _fault(out: Path, record: FileRecord) -> str | None:
    path = out / record.file
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{path} was changed since it was written: expected {record.bytes} bytes, found {size}"
        found = checksum(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if found != record.xxh3_64:
        return f"{path} was changed since it was written: expected xxh3-64 {record.xxh3_64}, found {found}"
    return None
