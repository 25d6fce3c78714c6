"""The table of setters says of each released SGLang what its source does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from setter_source import PARTS, Class, Models, fed
from sglang_capture_patches import contract
from test_contract import VERSIONS, source_of

from sglang_capture.drafts import releases
from sglang_capture.drafts.rules import SETTERS, Setter
from sglang_capture.drafts.served import BEFORE_NORM, CLASSES
from sglang_capture.drafts.setters import TABLE, find_setter

LAYERS = 20
IDS = ([1, 8, 16], [2, 9, 16], [3, 9, 17], [0, 9, 17], [1, 2], [17])
NO_TARGETS = re.compile(r"(NextN|MTP|Eagle3?|AssistantForCausalLM)$|^EmbeddingGemmaModel$|^Lfm2BidirectionalModel$")
"""Classes that only inherit a setter: drafts, multi-token prediction, embedding models."""
DRAFT_MODULES = (
    *("llama_eagle", "llama_eagle3", "kimi_k25_eagle3", "qwen2_eagle", "mistral_eagle", "mistral_large_3_eagle"),
    *("dflash", "dspark", "dspark_minimax", "deepseek_v4_dspark", "lfm2_dspark", "lilicorr"),
)
"""SGLang's modules with drafts of the kinds that are told apart here."""
PROXIED = {
    "MiniCPMV4_6ForConditionalGeneration": ("minicpmv", "MiniCPMV4_6"),
    "MiniCPMV4_7ForConditionalGeneration": ("minicpmv", "MiniCPMV4_6"),
}
"""Classes that hand every attribute on to another, which they make by the version in the config."""


@pytest.fixture(scope="module", params=VERSIONS)
def released(request: pytest.FixtureRequest) -> tuple[str, Models]:
    return request.param, Models(source_of(request.param))


def targets(models: Models) -> Iterator[tuple[str, Class]]:
    """By architecture, the class that SGLang makes of it."""
    for cls in models.entries():
        if not NO_TARGETS.search(cls[1]):
            yield cls[1], PROXIED.get(cls[1], cls)


def row(architecture: str, algorithm: str, version: str) -> Setter | None:
    """The table's own row; not the one of DFlash that DSPARK falls back on."""
    rows = [
        each
        for each in TABLE
        if each.algorithm == algorithm
        and architecture in each.architectures
        and releases.holds(version, each.since, each.until)
    ]
    assert len(rows) <= 1, (architecture, algorithm, version)
    return rows[0] if rows else None


def test_every_setter_of_a_release_is_in_the_table_and_nothing_else(released: tuple[str, Models]) -> None:
    version, models = released
    for algorithm, method in SETTERS.items():
        sources = {name: models.owner(cls, method) for name, cls in targets(models)}
        found = {name: source for name, source in sources.items() if source}
        listed = {
            name: each.source
            for each in TABLE
            if each.algorithm == algorithm and releases.holds(version, each.since, each.until)
            for name in each.architectures
        }
        assert listed == found, (version, algorithm)


def test_no_class_with_a_setter_is_passed_by(released: tuple[str, Models]) -> None:
    """Each is a source in the table, or a part that one of them hands the ids on to."""
    _, models = released
    parts = {part for _, cls in targets(models) for name in PARTS if (part := models.part(cls, name))}
    known = {each.source for each in TABLE} | {".".join(above) for part in parts for above in models.mro(part)}
    own = {
        f"{module}.{name}"
        for module, classes in models.classes.items()
        for name, cls in classes.items()
        if any(getattr(statement, "name", None) in SETTERS.values() for statement in cls.body)
    }
    assert own
    assert own - known == set()


def test_the_indices_are_those_that_the_source_takes(released: tuple[str, Models]) -> None:
    version, models = released
    checked = 0
    for architecture, cls in targets(models):
        for algorithm in SETTERS:
            rule = row(architecture, algorithm, version)
            if rule is None or rule.none:
                continue
            for ids in IDS:
                expected = list(rule.indices(ids, LAYERS))
                assert fed(models, cls, algorithm, list(ids), LAYERS) == expected, (
                    version,
                    architecture,
                    algorithm,
                    ids,
                )
                checked += 1
            if algorithm == "eagle3":
                assert fed(models, cls, algorithm, None, LAYERS) == list(rule.indices(None, LAYERS)), (
                    version,
                    architecture,
                )
            refused = str(fed(models, cls, algorithm, [9, 2], LAYERS)).startswith("ValueError")
            assert refused == rule.strict, (version, architecture, algorithm)
    assert checked > 200


def test_the_classes_of_drafts_are_those_of_a_release(released: tuple[str, Models]) -> None:
    version, models = released
    found = {name for module, name in models.entries() if module in DRAFT_MODULES}
    assert {name for name, since in CLASSES.items() if releases.holds(version, since)} == found


def test_the_targets_that_hand_a_draft_other_rows_than_those_after_the_norm(released: tuple[str, Models]) -> None:
    version, models = released
    listed = {name for each in TABLE for name in each.architectures}
    handing = {
        name
        for name, cls in targets(models)
        if name in listed
        and any("hidden_states_before_norm" in ast.unparse(models.classes[m][c]) for m, c in models.mro(cls))
    }
    assert handing <= BEFORE_NORM
    if version == VERSIONS[-1]:
        assert handing == BEFORE_NORM


def test_gpt_oss_takes_ids_as_indices_when_the_greatest_is_n(released: tuple[str, Models]) -> None:
    version, models = released
    ids = [2, 10, LAYERS]
    rule = find_setter("GptOssForCausalLM", "eagle3", version)
    assert isinstance(rule, Setter)
    if releases.holds(version, "0.5.17"):
        assert (
            fed(models, ("gpt_oss", "GptOssForCausalLM"), "eagle3", ids, LAYERS)
            == ids
            == list(rule.indices(ids, LAYERS))
        )


def test_where_nothing_is_captured_or_a_method_lacks_the_source_says_so(released: tuple[str, Models]) -> None:
    version, models = released
    for architecture, cls in targets(models):
        for algorithm in SETTERS:
            rule = row(architecture, algorithm, version)
            outcome = fed(models, cls, algorithm, [2, 9, 16], LAYERS) if rule else None
            if rule and rule.none.endswith("nothing is captured"):
                assert outcome == [], (version, architecture)
            elif rule and ("AttributeError" in rule.none or "MindSpore" in rule.none):
                assert str(outcome).startswith("AttributeError"), (version, architecture)


def test_gemma3_leaves_the_residual_out_from_the_release_on_that_the_table_says(released: tuple[str, Models]) -> None:
    """Its loop hands over ``hidden_states`` alone; that is all as long as a layer returns no residual beside it."""
    version, models = released
    forward = models.method(("gemma3_causal", "Gemma3TextModel"), "forward")
    assert forward is not None
    source = ast.unparse(forward)
    assert "aux_hidden_states.append(hidden_states)" in source
    rule = find_setter("Gemma3ForCausalLM", "eagle3", version)
    assert isinstance(rule, Setter)
    assert bool(rule.none) == ("hidden_states, residual = layer(" in source)


def test_dspark_takes_the_setter_of_dflash_where_there_is_no_other(released: tuple[str, Models]) -> None:
    version, _ = released
    found = find_setter("Qwen3ForCausalLM", "dspark", version)
    setup = source_of(version) / "sglang/srt/model_executor/model_runner_components/attention_backend_setup.py"
    has_dspark = setup.is_file() and 'is_dspark and hasattr(model, "set_dspark_layers_to_capture")' in setup.read_text()
    assert isinstance(found, Setter) == has_dspark
    if isinstance(found, Setter):
        assert found.algorithm == "dflash"


def test_the_releases_are_those_of_the_plugin() -> None:
    assert (releases.OLDEST, releases.NEWEST) == (contract.OLDEST, contract.NEWEST_TESTED)
    assert releases.release("0.5.22.post1") == contract.release("0.5.22.post1") == (0, 5, 22)


@pytest.mark.parametrize("version", ["", "0.5.14", "0.5.24", "0.6.0", "main"])
def test_another_release_cannot_be_told(version: str) -> None:
    assert "are not known" in str(find_setter("LlamaForCausalLM", "eagle3", version))


def test_another_model_cannot_be_told() -> None:
    assert "no model of SGLang 0.5.23 that is called Strange" in str(find_setter("Strange", "eagle3", "0.5.23"))
    assert "has no set_dflash" in str(find_setter("Qwen2ForCausalLM", "dflash", "0.5.23"))


@pytest.mark.parametrize("rule", [each for each in TABLE if not each.none], ids=lambda each: each.source)
def test_ids_and_indices_are_each_others_inverse(rule: Setter) -> None:
    for wanted in [(2, 30, 58), (3, 31, 59), (1, 20), (2, 9, 60), (4, 5, 6, 7)]:
        ids = rule.ids_for(wanted, 61)
        assert ids is None or rule.indices(ids, 61) == wanted
    assert rule.ids_for((3, 31, 59), 61) is not None
    none = rule.ids_for((0, 3, 31), 61)
    assert (none is None) == (rule.ids in ("outputs", "outputs unless the greatest is n"))


def test_the_three_indices_of_a_deepseek_can_be_asked_for_in_two_ways() -> None:
    rule = find_setter("DeepseekV3ForCausalLM", "eagle3", "0.5.23")
    assert isinstance(rule, Setter)
    assert rule.indices((1, 29, 57), 61) == rule.indices((2, 30, 58), 61) == rule.indices(None, 61) == (2, 30, 58)
    llama = find_setter("LlamaForCausalLM", "eagle3", "0.5.23")
    assert isinstance(llama, Setter)
    assert llama.indices((2, 30, 58), 61) == (3, 31, 59)
