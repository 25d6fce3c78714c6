"""Other families than the tiny DeepSeek-V3, each on a server of its own: the same rows as transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import CONFIGS, make_model
from engine.served import Served, check_defaults, check_each_row_is_taken_once, check_layers_and_lengths, serving

pytestmark = pytest.mark.engine

OWN_CAPTURE = (
    "--enable-return-aux-hidden-states",
    *("--speculative-algorithm", "EAGLE3"),
    *("--return-aux-hidden-state-layer-ids", "0", "2"),
)
"""SGLang's own capture, as for an EAGLE-3 draft, through the same keywords of two of the layers."""

DOUBT = "not among the models whose rows were compared with transformers"


@pytest.fixture(scope="module", params=list(CONFIGS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family: str = request.param
    with serving(make_model(tmp_path_factory.mktemp(family), family), *OWN_CAPTURE) as served:
        yield served


def test_defaults(served: Served) -> None:
    check_defaults(served)


def test_layers_and_lengths(served: Served) -> None:
    check_layers_and_lengths(served)


def test_each_row_is_taken_once(served: Served) -> None:
    check_each_row_is_taken_once(served)


def test_the_servers_own_capture_goes_on_beside_ours(served: Served) -> None:
    prompt = served.draw(40)
    alone = own_capture(served, prompt)
    beside = own_capture(served, prompt, {"capture": "beside", "capture_layers": list(range(served.depth))})
    assert torch.equal(alone, beside)
    ours = served.server.dump("beside").hidden_states.unbind(1)
    for theirs in beside.chunk(2, dim=-1):
        assert sum(torch.equal(theirs, layer) for layer in ours) == 1


def own_capture(served: Served, prompt: list[int], mark: dict[str, Any] | None = None) -> torch.Tensor:
    """``[T, 2 * H]``: what SGLang hands to a client that asks for it."""
    answer = served.server.generate(prompt, request={"return_hidden_states": True}, custom_params=mark)
    return torch.tensor(answer["meta_info"]["hidden_states"][0])


def test_a_proved_model_starts_without_a_doubt(served: Served) -> None:
    assert DOUBT not in served.server.log_text()


def test_one_that_is_only_expected_to_be_right_starts_with_a_warning(tmp_path: Path) -> None:
    """Llama's layers by another name."""
    config = make_model(tmp_path, "llama") / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MistralForCausalLM"))
    with serving(tmp_path) as served:
        assert f"MistralForCausalLM is {DOUBT}" in served.server.log_text()
        check_defaults(served)
