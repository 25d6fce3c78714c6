"""Handing rows to a recorder as the engine does."""

import time

import torch
from factories import make_spec

from sglang_capture.capture import CaptureRequest
from sglang_capture.dump import load_dump

SPEC = make_spec(last_hidden="both")


def request(capture_id="a", tokens=10, gone=lambda: None, spec=SPEC):
    return CaptureRequest(capture_id, f"request-{capture_id}", spec, torch.arange(tokens) % spec.vocab_size, gone)


def rows(tokens, spec=SPEC, seed=0):
    """Every tensor of a capture, by key."""
    generator = torch.Generator().manual_seed(seed)
    keys = [*spec.layers, *spec.last_hidden_keys]
    return {k: torch.randn(tokens, spec.hidden_size, generator=generator).to(spec.torch_dtype) for k in keys}


def hand_over(recorder, capture, content, start, stop):
    for key, tensor in content.items():
        recorder.copy(capture, key, tensor[start:stop], start)
    recorder.commit(capture, start, stop)


def assert_dump_holds(path, content):
    dump = load_dump(path)
    for number, index in enumerate(dump.spec.layers):
        assert torch.equal(dump.hidden_states[:, number], content[index])
    for key in dump.spec.last_hidden_keys:
        assert torch.equal(dump.last_hidden[key], content[key])


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
