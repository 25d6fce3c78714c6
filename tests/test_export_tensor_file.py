"""Safetensors files written piece by piece, read by the library."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load

from sglang_capture.export.tensor_file import Stacked, whole, write_tensors


def written(tensors: dict[str, Stacked]) -> dict[str, torch.Tensor]:
    sink = io.BytesIO()
    write_tensors(sink, tensors, {"made": "by hand"})
    return load(sink.getvalue())


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint8]
)
def test_every_type_is_read_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    found = written({"a": whole(tensor)})["a"]
    assert found.dtype == dtype and torch.equal(found.float(), tensor.float())


def test_pieces_stand_one_after_another_and_are_asked_for_late() -> None:
    order: list[str] = []

    def pieces(name: str) -> Iterator[torch.Tensor]:
        order.append(name)
        yield from [torch.full((1, 2), float(len(order)), dtype=torch.bfloat16)] * 2

    found = written({name: Stacked(torch.bfloat16, (2, 2), pieces(name)) for name in ("first", "second")})
    assert order == ["first", "second"]
    assert found["first"].tolist() == [[1, 1], [1, 1]] and found["second"].tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("shape", "piece", "told"),
    [((3,), torch.zeros(2), "1 items short"), ((2,), torch.zeros(2).half(), "expected torch.float32")],
)
def test_pieces_that_do_not_fill_the_tensor_are_an_error(
    shape: tuple[int, ...], piece: torch.Tensor, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        written({"a": Stacked(torch.float32, shape, [piece])})
