"""NaN, Inf and all-zero rows are found exactly, in every dtype, and nothing else is."""

import pytest
import torch
from factories import make_spec
from recording import hand_over, request, rows

from sglang_capture import recorder as recorder_module
from sglang_capture.dump import load_dump
from sglang_capture.row_check import RowFaults
from sglang_capture.spool import failure_path, read_failure

SPEC = make_spec(last_hidden="both")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_is_found_and_its_place_named(dtype, value):
    rows = torch.randn(50, 300).to(dtype)
    rows[17, 299] = value
    faults = RowFaults()
    faults.look([(["index 3", "index 31"], torch.stack([torch.ones(50, 300, dtype=dtype), rows], dim=1))], start=100)
    assert (faults.nonfinite, faults.zero, faults.first) == (1, 0, "index 31, position 117")


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_and_rows_that_sum_to_zero_are_no_faults(dtype):
    rows = torch.zeros(3, 256, dtype=dtype)
    rows[0] = torch.finfo(dtype).max
    rows[1, 0], rows[1, 1] = 1, -1
    rows[2, 5] = torch.finfo(dtype).tiny
    faults = RowFaults()
    faults.look([(["x"], rows[:, None])])
    assert (faults.nonfinite, faults.zero, faults.first) == (0, 0, "")


def test_a_token_counts_once_whatever_is_wrong_with_it():
    rows = torch.zeros(4, 8)
    rows[1, 2] = float("nan")
    faults = RowFaults()
    faults.look([(["x"], rows[:, None]), (["y"], rows[:, None].clone())])
    assert (faults.nonfinite, faults.zero) == (1, 3)


def poisoned(value):
    content = rows(10, SPEC)
    content[31][4] = value
    content["last_hidden_state"][7] = value
    return content


def test_a_capture_with_nan_is_refused_with_the_place(tmp_path, make_recorder):
    recorder = make_recorder()
    hand_over(recorder, recorder.begin(request(spec=SPEC)), poisoned(float("nan")), 0, 10)
    recorder.close()
    failure = read_failure(failure_path(tmp_path, "a"))
    assert "2 of 10 tokens have NaN or Inf (first: index 31, position 4)" in failure.reason
    assert (failure.kind, failure.retriable) == ("failed", False)
    assert [path.name for path in tmp_path.iterdir()] == ["a.failed.json"]
    assert recorder.account.used == 0


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_or_published_with_its_label(tmp_path, make_recorder, monkeypatch, block):
    monkeypatch.setattr(recorder_module, "CHECK_BYTES", block)
    recorder = make_recorder(nonfinite="label")
    hand_over(recorder, recorder.begin(request(spec=SPEC)), poisoned(float("nan")), 0, 10)
    hand_over(recorder, recorder.begin(request("b", spec=SPEC)), rows(10, SPEC), 0, 10)
    recorder.close()
    assert load_dump(tmp_path / "a.pt").nonfinite_rows == 2
    assert torch.load(tmp_path / "a.pt", weights_only=True)["nonfinite_rows"].item() == 2
    assert load_dump(tmp_path / "b.pt").nonfinite_rows == 0
    assert recorder.counts.nonfinite_rows == 2


@pytest.mark.parametrize("nonfinite", ["refuse", "label"])
def test_rows_of_zeros_are_published_and_noticed(tmp_path, make_recorder, nonfinite):
    recorder = make_recorder(nonfinite=nonfinite)
    hand_over(recorder, recorder.begin(request(spec=SPEC)), poisoned(0.0), 0, 10)
    recorder.close()
    assert (recorder.counts.published, recorder.counts.zero_rows) == (1, 2)
    assert "2 that have a row of zeros" in recorder.last_error
    assert load_dump(tmp_path / "a.pt").zero_rows == (2 if nonfinite == "label" else 0)
