"""Where two computations of the same rows first differ: by kind, by position, and over all."""

from __future__ import annotations

import json

import pytest
import torch
from factories import make_dump, make_spec

from sglang_capture.comparison import Comparison, rows_of
from sglang_capture.dump import Dump

TOKENS = 40


def dump_of(capture_id: str = "a", seed: int = 0, dtype: str = "float32") -> Dump:
    return make_dump(make_spec(layers=(0, 3, 31), last_hidden="both", dtype=dtype), capture_id, TOKENS, seed)


def compare(*pairs: tuple[Dump, dict[str, torch.Tensor]], dtype: str = "float32") -> Comparison:
    comparison = Comparison()
    for dump, expected in pairs:
        comparison.add(dump, expected, dtype)
    return comparison


def expected_of(dump: Dump) -> dict[str, torch.Tensor]:
    return {name: rows.clone() for name, rows in rows_of(dump).items()}


def firsts(comparison: Comparison) -> dict[str, tuple[str, int]]:
    found = {kind.name: kind.first_difference for kind in comparison.kinds}
    return {name: (first.sample_id, first.position) for name, first in found.items() if first}


def test_what_agrees_differs_nowhere() -> None:
    dump = dump_of()
    comparison = compare((dump, expected_of(dump)))
    assert comparison.first_difference is None
    assert [(kind.ok, kind.rows, kind.rows_off, kind.first_difference) for kind in comparison.kinds] == [
        (True, TOKENS, 0, None)
    ] * 5


def test_the_earliest_position_of_each_kind_and_the_lowest_layer_of_all_are_named() -> None:
    one, two = dump_of("one", 1), dump_of("two", 2)
    expected = expected_of(one), expected_of(two)
    for which, name, position in ((0, "index 31", 7), (1, "index 31", 5), (1, "index 3", 20), (1, "index 3", 22)):
        expected[which][name][position] *= 1.5
    comparison = compare((one, expected[0]), (two, expected[1]))
    assert firsts(comparison) == {"index 3": ("two", 20), "index 31": ("two", 5)}
    assert [kind.rows_off for kind in comparison.kinds] == [0, 2, 2, 0, 0]
    assert [kind.rows for kind in comparison.kinds] == [2 * TOKENS] * 5
    first = comparison.first_difference
    assert first is not None
    assert (first.name, first.sample_id, first.position) == ("index 3", "two", 20)
    assert first.token_id == int(two.input_ids[20])
    assert first.error == pytest.approx(1 / 3) and first.allowed == 1e-5


@pytest.mark.parametrize(
    ("names", "lowest"),
    [
        (("last_hidden_state", "last_hidden_state_prenorm"), "last_hidden_state_prenorm"),
        (("last_hidden_state", "index 31"), "index 31"),
        (("index 31", "index 3", "index 0"), "index 0"),
    ],
)
def test_kinds_are_ordered_as_a_forward_computes_them(names: tuple[str, ...], lowest: str) -> None:
    dump = dump_of()
    expected = expected_of(dump)
    for position, name in enumerate(names):
        expected[name][position] += 1
    first = compare((dump, expected)).first_difference
    assert first is not None and first.name == lowest


def test_a_row_that_is_not_finite_differs() -> None:
    dump = dump_of()
    expected = expected_of(dump)
    dump.hidden_states[9, 1, 2] = torch.nan
    (kind,) = [kind for kind in compare((dump, expected)).kinds if not kind.ok]
    assert (kind.rows_off, kind.first_difference and kind.first_difference.position) == (1, 9)
    content = json.loads(json.dumps(kind.model_dump(mode="json"), allow_nan=False))
    assert content["first_difference"]["error"] == "Infinity"


def test_in_bfloat16_a_row_may_be_off_by_rounding_and_most_rows_may_not() -> None:
    dump = dump_of(dtype="bfloat16")
    expected = {name: rows.float() for name, rows in expected_of(dump).items()}
    few, most = expected_of(dump), expected_of(dump)
    for rows, start in ((few, TOKENS - 10), (most, 12)):
        rows.update({name: rows.float() for name, rows in rows.items()})
        rows["index 3"][start:] *= 1.25
    assert compare((dump, expected)).first_difference is None
    assert compare((dump, few)).first_difference is None
    first = compare((dump, most)).first_difference
    assert first is not None
    assert (first.name, first.position, first.allowed) == ("index 3", 12, 0.05)


def test_rows_within_the_bound_that_are_another_states_rows_differ() -> None:
    dump = dump_of(dtype="bfloat16")
    expected = {name: rows.float() for name, rows in expected_of(dump).items()}
    expected["index 3"] = expected["index 3"] * 1.04
    expected["index 31"] = rows_of(dump)["index 3"].float()
    (kind,) = [kind for kind in compare((dump, expected)).kinds if kind.name == "index 3"]
    assert not kind.ok and kind.looks_like == "index 31" and kind.worst_error < kind.allowed_middle
    assert kind.rows_off == TOKENS
    assert kind.first_difference is not None
    assert (kind.first_difference.position, kind.first_difference.allowed) == (0, None)


@pytest.mark.parametrize("step", [1, -1])
def test_rows_moved_by_a_token_differ_from_the_first_on(step: int) -> None:
    dump = dump_of()
    expected = {name: rows.roll(-step, 0) for name, rows in rows_of(dump).items()}
    comparison = compare((dump, expected))
    assert {kind.looks_like for kind in comparison.kinds} == {
        f"{kind.name} of the token {'before' if step > 0 else 'after'}" for kind in comparison.kinds
    }
    first = comparison.first_difference
    assert first is not None and (first.name, first.position) == ("index 0", 0)
