"""Fixtures that several test files share."""

import tempfile
from pathlib import Path

import pytest

from sglang_capture.quota import Account
from sglang_capture.recorder import Recorder


@pytest.fixture
def shared_memory():
    """A directory on the file system that spools are made for."""
    with tempfile.TemporaryDirectory(prefix="sglang-capture-test-", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def make_recorder(tmp_path):
    made = []

    def make(limit=1 << 30, directory=tmp_path, **options):
        made.append(Recorder(directory, Account(limit), rank="r", device="cpu", **options))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()
