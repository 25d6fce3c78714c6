"""``.tolist()`` and JSON, as SGLang's own ``return_hidden_states`` does it (with orjson, one process, no sockets).

The engine's way has two more copies of this in pickle between its processes, which are left out here.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from benchmarks.common import Rows


def write(rows: Rows, directory: Path, number: int) -> Path:
    path = directory / f"json-{number}.json"
    states = [state.float().tolist() for state in (*rows.layers, rows.last)]
    path.write_bytes(orjson.dumps({"hidden_states": states}))
    return path
