"""Other families than the tiny DeepSeek-V3, each on a server of its own: the same rows as transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.models import CONFIGS, make_model
from engine.served import Served, check_defaults, check_each_row_is_taken_once, check_layers_and_lengths, serving

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=list(CONFIGS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family: str = request.param
    with serving(make_model(tmp_path_factory.mktemp(family), family)) as served:
        yield served


def test_defaults(served: Served) -> None:
    check_defaults(served)


def test_layers_and_lengths(served: Served) -> None:
    check_layers_and_lengths(served)


def test_each_row_is_taken_once(served: Served) -> None:
    check_each_row_is_taken_once(served)


def test_a_proved_model_starts_without_a_doubt(served: Served) -> None:
    assert "compared with transformers" not in served.server.log_text()
