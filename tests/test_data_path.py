"""Inside the server rows go from tensor to file: never through Python objects, and nothing of them is kept."""

from __future__ import annotations

import ast
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from recording import hand_over, request, rows

ROOT = Path(__file__).parents[1]
PASSED_THROUGH = (
    *("patches/sglang_capture_patches/" + name for name in ("batch_plan.py", "model_forward.py")),
    *("sglang_capture/" + name for name in ("filler.py", "copying.py", "recorder.py", "dump.py")),
)
"""The modules that rows pass through on their way."""

CONVERSIONS = {"tolist", "item", "numpy", "tobytes", "dumps", "loads", "save_file", "share_memory_", "float"}


@pytest.mark.parametrize("module", PASSED_THROUGH)
def test_no_row_becomes_a_python_object(module: str) -> None:
    tree = ast.parse((ROOT / module).read_text())
    called = {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert called & CONVERSIONS == set()


def test_nothing_is_kept_of_a_capture_that_is_over(tmp_path: Path, make_recorder: Any) -> None:
    recorder = make_recorder()
    over = []
    for number in range(200):
        capture = recorder.begin(request(f"c{number}"))
        if number % 10:
            hand_over(recorder, capture, rows(10), 0, 10)
        else:
            recorder.fail(capture, "aborted")
        over.append(weakref.ref(capture))
    del capture
    recorder.close()
    gc.collect()
    assert recorder.counts.published == 180 and recorder.in_flight == 0
    assert [reference() for reference in over if reference() is not None] == []
