"""What is tapped in a model, by what its layers can do. (SGLang's own classes: engine/test_inner_models.py.)"""

from __future__ import annotations

import pytest
from sglang_capture_patches.families import GATHERED, PRODUCED
from sglang_capture_patches.search import UnknownModelError, find_inner
from torch import nn


class Gathered(nn.Module):
    def forward(self, hidden, captured_last_layer_outputs=None): ...


class Produced(nn.Module):
    def forward(self, hidden, capture_output=None): ...


class Both(nn.Module):
    def forward(self, hidden, capture_output=None, captured_last_layer_outputs=None): ...


class LooksItUp(nn.Module):
    def forward(self, hidden, **kwargs):
        return kwargs.get("captured_last_layer_outputs")


class TakesAnything(nn.Module):
    def forward(self, hidden, **kwargs): ...


class Deaf(nn.Module):
    def forward(self, hidden): ...


def decoder(*layers: type[nn.Module], norm: str = "norm") -> nn.Module:
    module = nn.Module()
    module.layers = nn.ModuleList(layer() for layer in layers)
    module.add_module(norm, nn.LayerNorm(4))
    return module


def wrapped(**parts: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


@pytest.mark.parametrize(
    ("layers", "keyword"),
    [
        ((Gathered, Gathered), GATHERED),
        ((Produced, Produced), PRODUCED),
        ((Both, Both), GATHERED),
        ((Both, Produced), PRODUCED),
        ((Gathered, LooksItUp), GATHERED),
    ],
)
def test_the_keyword_is_one_that_all_layers_take(layers, keyword):
    model = decoder(*layers)
    inner = find_inner(wrapped(model=model))
    assert inner.layers is model.layers
    assert inner.norm is model.norm
    assert inner.keyword == keyword
    assert inner.held == range(2)


def test_an_unknown_family_is_expected_at_best():
    assert find_inner(decoder(Gathered)).state == "expected"


def test_it_is_found_below_wrappers_and_beside_a_tower():
    inner = decoder(Gathered)
    model = wrapped(
        vision_tower=wrapped(model=decoder(Gathered)), language_model=wrapped(model=inner), projector=decoder(Deaf)
    )
    assert find_inner(model).layers is inner.layers


@pytest.mark.parametrize("name", ["vision_tower", "visual", "audio_encoder", "speech_model", "image_model"])
def test_a_tower_is_never_taken(name):
    with pytest.raises(UnknownModelError, match="no decoder layers in it take"):
        find_inner(wrapped(**{name: decoder(Gathered)}))


def test_two_that_could_be_meant_are_refused():
    with pytest.raises(UnknownModelError, match="several models that could be meant: thinker, talker"):
        find_inner(wrapped(thinker=decoder(Gathered), talker=decoder(Produced)))


@pytest.mark.parametrize("layers", [(Gathered, Deaf), (Gathered, Produced), (Gathered, TakesAnything)])
def test_a_keyword_that_only_some_layers_take_is_refused(layers):
    with pytest.raises(UnknownModelError, match="only some layers"):
        find_inner(decoder(*layers))


@pytest.mark.parametrize("layers", [(Deaf,), (TakesAnything,)])
def test_layers_without_a_keyword_are_named(layers):
    with pytest.raises(UnknownModelError, match=r"no decoder layers .* \(Module\)"):
        find_inner(decoder(*layers))


def test_a_model_without_layers_says_so():
    with pytest.raises(UnknownModelError, match="found none"):
        find_inner(nn.Linear(2, 2))


def test_without_a_final_norm_nothing_is_tapped():
    with pytest.raises(UnknownModelError, match="no final norm called norm"):
        find_inner(decoder(Gathered, norm="final_norm"))


def test_layers_of_other_pipeline_stages_are_passed_by():
    """SGLang puts an identity in their place."""
    inner = find_inner(decoder(nn.Identity, nn.Identity, Gathered, Gathered, nn.Identity))
    assert inner.held == range(2, 4)
    assert len(inner.layers) == 5


def holder(module: str, name: str, *layers: type[nn.Module]) -> nn.Module:
    """A model whose class has a name from the table of families."""
    model = type(name, (nn.Module,), {"__module__": f"sglang.srt.models.{module}"})()
    model.layers = nn.ModuleList(layer() for layer in layers)
    model.norm = nn.LayerNorm(4)
    return model


def test_a_release_whose_layers_do_not_take_it_yet_is_told_which_do():
    with pytest.raises(UnknownModelError, match=r"Llama.*: captured from SGLang 0.5.22 on"):
        find_inner(wrapped(model=holder("llama", "LlamaModel", Deaf)))


def test_a_family_that_is_refused_says_why():
    with pytest.raises(UnknownModelError, match=r"Nanbeige.* cannot be captured from: its layers run several times"):
        find_inner(wrapped(model=holder("nanbeige", "NanbeigeModel", Produced)))


def test_a_model_is_proved_by_its_own_name():
    llama = type("LlamaForCausalLM", (nn.Module,), {})()
    llama.model = holder("llama", "LlamaModel", Produced)
    assert find_inner(llama).state == "proved"
    mistral = type("MistralForCausalLM", (nn.Module,), {})()
    mistral.model = llama.model
    assert find_inner(mistral).state == "expected"
