"""A family's model on a server of its own, beside its oracle; and what must hold for every family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.captures import CapturingServer, assert_rows_agree, spool_directory
from engine.oracle import Oracle
from sglang_capture.layers import default_layers

CHUNK = 64
"""Prompts are cut into chunks of this, so that what holds for chunks is seen for every family."""

LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 8)


@dataclass
class Served:
    server: CapturingServer
    oracle: Oracle
    depth: int

    def draw(self, length: int) -> list[int]:
        """The same prompt for the same length."""
        return self.oracle.draw_prompt(length, torch.Generator().manual_seed(length))


@contextmanager
def serving(directory: Path, *arguments: str, oracle: Oracle | None = None) -> Iterator[Served]:
    """The model in ``directory``, in float32; what we capture is left to the defaults.

    Args:
        oracle: what its rows are compared with; by default the same directory's.
    """
    config = json.loads((directory / "config.json").read_text())
    chunked = ("--dtype", "float32", "--chunked-prefill-size", str(CHUNK), *arguments)
    with spool_directory() as spool, CapturingServer(directory, spool, *chunked) as server:
        yield Served(server, oracle or Oracle(directory), config.get("text_config", config)["num_hidden_layers"])


def check_defaults(served: Served) -> None:
    """What is captured if nothing is said: the layers by depth, each named once, and the state after the norm."""
    prompt = served.draw(20)
    served.server.capture(prompt, {"capture": "by-default"})
    dump = served.server.dump("by-default")
    assert dump.spec.layers == default_layers(served.depth)
    assert (dump.spec.num_layers, dump.spec.last_hidden) == (served.depth, "post")
    assert_rows_agree(dump, served.oracle, prompt)


def check_layers_and_lengths(served: Served) -> None:
    """All indices, the first alone, the last alone; both last states; marked beside unmarked in one batch."""
    every = list(range(served.depth))
    wishes = [(every, "both"), ([0], "none"), ([0, served.depth - 1], "pre"), (every[1:], "post")]
    requests = []
    for number, length in enumerate([*LENGTHS, *LENGTHS]):
        layers, last_hidden = wishes[number % len(wishes)]
        mark = {"capture": f"sets-{number}", "capture_layers": layers, "capture_last_hidden": last_hidden}
        requests.append((served.draw(length), mark if number % 3 else None))

    def send(request):
        prompt, mark = request
        return served.server.capture(prompt, mark, max_new_tokens=3)["output_ids"]

    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(send, requests))
    for (prompt, mark), answer in zip(requests, answers, strict=True):
        assert answer == served.server.generate(prompt, max_new_tokens=3)["output_ids"]
        if mark:
            dump = served.server.dump(mark["capture"])
            assert dump.spec.layers == tuple(mark["capture_layers"])
            assert dump.spec.last_hidden == mark["capture_last_hidden"]
            assert_rows_agree(dump, served.oracle, prompt)


def check_each_row_is_taken_once(served: Served) -> None:
    """Layers may take two keywords; what is counted is copies: one a chunk for each index and each last state."""
    before = served.server.counts().copies
    mark = {"capture": "once", "capture_layers": list(range(served.depth)), "capture_last_hidden": "both"}
    served.server.capture(served.draw(2 * CHUNK), mark)
    served.server.dump("once")
    assert served.server.counts().copies - before == 2 * (served.depth + 2)
