"""A spool, and what runs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.running import serving
from service.standin import StandInServer


@pytest.fixture
def spool_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "spool"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def sglang(spool_dir: Path) -> Iterator[StandInServer]:
    server = StandInServer(spool_dir)
    yield server
    server.close()


@pytest.fixture
def service(tmp_path: Path, sglang: StandInServer) -> Iterator[httpx.Client]:
    with serving(tmp_path) as client:
        yield client
