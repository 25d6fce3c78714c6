"""How deep is too deep, and what is left of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from service.checks import nested

from sglang_capture.nesting import cut, too_deep


@pytest.mark.parametrize(
    ("value", "levels"),
    [(1, 0), ({}, 1), ([1, 2], 1), ({"a": []}, 2), ([1, {"a": [{}]}, []], 4), (nested(900), 900)],
)
def test_levels_are_counted(value: Any, levels: int) -> None:
    assert not too_deep(value, levels)
    if levels:
        assert too_deep(value, levels - 1)


def test_what_is_cut_fits_and_loses_nothing_else() -> None:
    assert cut({"a": [1, [2]], "b": "x"}, 2) == {"a": [1, "…"], "b": "x"}
    deep = {"a": nested(900), "b": 1}
    assert not too_deep(cut(deep))
    assert too_deep(deep)
    assert len(json.dumps(cut(deep))) < 1000
