"""docs/trainers.md says of every export format which trainer was run on it."""

from __future__ import annotations

import re

from documents import DOCS, ROOT

from sglang_capture.export import exporters


def test_every_format_is_in_the_table() -> None:
    named = set(re.findall(r"^\| `([a-z][a-z0-9-]+)` \|", (DOCS / "trainers.md").read_text(), re.MULTILINE))
    assert named == {exporter.name for exporter in exporters()}


def test_every_test_that_is_named_is_there() -> None:
    tests = re.findall(r"`(tests/trainers/\w+\.py)::(\w+)", (DOCS / "trainers.md").read_text())
    assert tests
    for file, name in tests:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_every_environment_has_its_requirements() -> None:
    wanted = re.search(r"^TRAINERS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wanted
    files = {path.stem for path in (ROOT / "tests/trainers/requirements").glob("*.txt") if ".no-deps" not in path.name}
    assert set(wanted[1].split()) == files
    assert all(f"`{name}`" in (DOCS / "trainers.md").read_text() for name in files)
