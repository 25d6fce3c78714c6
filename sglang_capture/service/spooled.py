"""What lies in the spool under an id, and what the catalog may know of it.

Who removes dumps by hand, or captures an id again while no service looks, leaves another dump there than was recorded.
So each use of a dump's rows beside its record proves them to belong together.
"""

from __future__ import annotations

from pathlib import Path

from sglang_capture import spool
from sglang_capture.catalog import DumpFacts, origin
from sglang_capture.dump import Dump, DumpError, load_dump


def read_spooled(directory: Path, capture_id: str) -> tuple[Dump, DumpFacts]:
    """The dump under an id, mapped, and what tells whose it is.

    Raises:
        FileNotFoundError: there is none.
        DumpError: it cannot be read, or is that of another id.
    """
    path = spool.dump_path(directory, capture_id)
    dump = load_dump(path)
    if dump.capture_id != capture_id:
        raise DumpError(f"{path} is the dump of {dump.capture_id!r:.140}: was it renamed?")
    ran = origin.of_ids(dump.input_ids.numpy())
    return dump, DumpFacts(capture_id, dump.tokens, dump.spec, ran, dump.request_id)
