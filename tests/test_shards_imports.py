"""What an import costs: the plugin and `--help` pay for no torch, a trainer for no transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sglang_capture


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import sglang_capture.commands.export, sglang_capture.commands.verify", "torch"),
        ("import sglang_capture.shards, sglang_capture.export, sglang_capture.verify", "transformers"),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(code: str, absent: str) -> None:
    check = f"{code}; import sys; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert all(getattr(sglang_capture, name) for name in sglang_capture.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        sglang_capture.absent  # noqa: B018
