"""Fixtures that several test files share."""

import pytest

from sglang_capture.quota import Account
from sglang_capture.recorder import Recorder


@pytest.fixture
def make_recorder(tmp_path):
    made = []

    def make(limit=1 << 30, **options):
        made.append(Recorder(tmp_path, Account(limit), rank="r", device="cpu", **options))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()
