"""Rows reach their place, whatever the engine does with its buffer; the engine waits for room, and not for ever."""

import queue
import threading

import pytest
import torch

from sglang_capture.copying import DirectCopier, PinnedCopier
from sglang_capture.patience import Patience

PATIENT = Patience(30)

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_in_host_memory_the_copy_is_done_when_the_call_returns():
    source, place = torch.randn(5, 8), torch.zeros(5, 8)
    DirectCopier().copy(place, source, PATIENT)
    expected = source.clone()
    source.fill_(float("nan"))
    assert torch.equal(place, expected)


def test_a_copy_waits_for_room_and_gives_up_in_the_end():
    copier = PinnedCopier(lambda task: None, budget=100)
    copier._take(60, PATIENT)
    with pytest.raises(TimeoutError, match="does not keep up"):
        copier._take(60, Patience(0.05))
    copier._give(60)
    copier._take(60, PATIENT)


def test_a_copy_goes_on_as_soon_as_there_is_room():
    copier = PinnedCopier(lambda task: None, budget=100)
    copier._take(100, PATIENT)
    waiting = threading.Thread(target=copier._take, args=(50, PATIENT))
    waiting.start()
    copier._give(100)
    waiting.join(10)
    assert not waiting.is_alive()


def test_one_copy_larger_than_all_the_room_goes_alone():
    copier = PinnedCopier(lambda task: None, budget=100)
    copier._take(1000, PATIENT)
    copier._give(1000)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_arrive_whatever_the_engine_does_with_its_buffer(dtype):
    """The buffer is poisoned right behind each copy, as the next kernel of the engine would write over it."""
    tasks: queue.SimpleQueue = queue.SimpleQueue()
    copier = PinnedCopier(tasks.put, budget=1 << 24)
    writer = threading.Thread(target=lambda: [task() for task in iter(tasks.get, None)])
    writer.start()
    generator = torch.Generator().manual_seed(0)
    buffer = torch.empty(512, 1024, dtype=dtype, device="cuda")
    copied = []
    for _ in range(300):
        rows = int(torch.randint(1, 513, (1,), generator=generator))
        content = torch.randn(rows, 1024, generator=generator).to(dtype)
        place = torch.zeros(rows, 1024, dtype=dtype)
        buffer[:rows].copy_(content)
        copier.copy(place, buffer[:rows], PATIENT)
        buffer.fill_(float("nan"))
        copied.append((place, content))
    tasks.put(None)
    writer.join()
    assert all(torch.equal(place, content) for place, content in copied)
