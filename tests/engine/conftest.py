"""Models and oracles of the engine tests: made once for all of them, since each takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.oracle import Oracle

from sglang_capture.tiny_model import make_tiny_model


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
