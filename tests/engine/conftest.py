"""Models and oracles of the engine tests: made once for all of them, since each takes seconds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.captures import CapturingServer, spool_directory
from engine.oracle import Oracle
from sglang_capture.tiny_model import make_tiny_model

FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """61 layers, as the model that this is about."""
    return _made(tmp_path_factory, layers=61)


@pytest.fixture(scope="session")
def tiny6_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 layers: a tenth of the time per token."""
    return _made(tmp_path_factory, layers=6)


@pytest.fixture(scope="session")
def oracle(tiny_model_dir: Path) -> Oracle:
    return Oracle(tiny_model_dir)


@pytest.fixture(scope="session")
def oracle6(tiny6_model_dir: Path) -> Oracle:
    return Oracle(tiny6_model_dir)


def _made(tmp_path_factory: pytest.TempPathFactory, *, layers: int) -> Path:
    directory = tmp_path_factory.mktemp(f"tiny{layers}")
    make_tiny_model(directory, layers=layers)
    return directory


@pytest.fixture(scope="session")
def server(tiny6_model_dir: Path) -> Iterator[CapturingServer]:
    """The usual server: float32, prefix cache on, everything else as SGLang sets it."""
    with spool_directory() as spool, CapturingServer(tiny6_model_dir, spool, *FLOAT32, layers="0,3,5") as running:
        yield running


@pytest.fixture(scope="session")
def chunking_server(tiny_model_dir: Path) -> Iterator[CapturingServer]:
    """61 layers, and prompts in chunks of 64."""
    arguments = (*FLOAT32, "--chunked-prefill-size", "64")
    with spool_directory() as spool, CapturingServer(tiny_model_dir, spool, *arguments) as running:
        yield running


@pytest.fixture(scope="session")
def bfloat16_server(tiny6_model_dir: Path) -> Iterator[CapturingServer]:
    """The same weights as the usual server's, in the precision that people serve in."""
    arguments = ("--dtype", "bfloat16")
    with (
        spool_directory() as spool,
        CapturingServer(tiny6_model_dir, spool, *arguments, layers="0,3,5", last_hidden="both") as running,
    ):
        yield running


@pytest.fixture
def new_id() -> Callable[[], str]:
    """Capture ids that no test has used."""
    return lambda: f"test-{uuid.uuid4().hex}"


@pytest.fixture
def draw(oracle6: Oracle) -> Callable[[int], list[int]]:
    """Prompts that no test has used, safe for the oracle of the six-layer model."""
    generator = torch.Generator().manual_seed(uuid.uuid4().int % (1 << 60))
    return lambda length: oracle6.draw_prompt(length, generator)
