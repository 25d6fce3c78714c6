"""The table of families says of each release what its source says, and the documentation says what the table says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import DOCS
from sglang_capture_patches.families import FAMILIES, KEYWORDS, Family, family_of
from test_contract import VERSIONS, source_of

from sglang_capture.drafts.releases import release

NEWEST = VERSIONS[-1]
EMBEDDINGS = {"embed_tokens", "word_embeddings", "tok_embeddings", "embeddings"}
OTHERS = re.compile(r"nextn|mtp|eagle|dspark|dflash|lilicorr|clip|siglip|whisper|_vit$|embedding")


class Models:
    """The classes below ``sglang.srt.models`` of one release, by module and name."""

    def __init__(self, version: str) -> None:
        root = source_of(version) / "sglang/srt/models"
        self.classes = dict(_classes(root))

    def takes(self, layer: str) -> set[str]:
        """The keywords of a class's own ``forward``: parameters, or looked up in ``**kwargs``."""
        for function in self.classes[layer].body if layer in self.classes else []:
            if isinstance(function, ast.FunctionDef) and function.name == "forward":
                arguments = function.args
                names = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}
                if arguments.kwarg is not None:
                    names |= {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
                return names & set(KEYWORDS)
        return set()

    def sets(self, holder: str) -> set[str]:
        """What a class, and the classes of that name it is derived from, assign to ``self``."""
        found: set[str] = set()
        names = [holder.split(".")[-1]]
        while names:
            name = names.pop()
            for cls in (cls for key, cls in self.classes.items() if key.endswith(f".{name}")):
                found |= {node.attr for node in ast.walk(cls) if isinstance(node, ast.Attribute)}
                names += [base.id for base in cls.bases if isinstance(base, ast.Name) and base.id != name]
        return found


def _classes(root: Path) -> Iterator[tuple[str, ast.ClassDef]]:
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef):
                yield f"{module}.{node.name}", node


@pytest.fixture(scope="module", params=VERSIONS)
def models(request: pytest.FixtureRequest) -> tuple[str, Models]:
    return request.param, Models(request.param)


def test_layers_take_their_keywords_from_the_release_on_that_the_table_says(models: tuple[str, Models]) -> None:
    version, source = models
    for family in FAMILIES:
        expected = {keyword for keyword, since in family.keywords.items() if release(version) >= release(since)}
        for layer in family.layers:
            assert source.takes(layer) == expected, (version, layer)


def test_every_class_that_takes_a_keyword_is_in_the_table(models: tuple[str, Models]) -> None:
    _, source = models
    listed = {layer for family in FAMILIES for layer in family.layers}
    assert {layer for layer in source.classes if source.takes(layer)} <= listed


def test_the_holders_have_layers_and_the_norm_that_is_named() -> None:
    source = Models(NEWEST)
    for family in FAMILIES:
        assert family.holder in source.classes
        assert {"layers", family.norm} <= source.sets(family.holder), family.holder


def test_the_models_that_were_proved_are_classes_of_sglang() -> None:
    names = {key.split(".")[-1] for key in Models(NEWEST).classes}
    proved = [name for family in FAMILIES for name in family.proved]
    assert len(proved) == 10
    assert set(proved) <= names


def test_layers_of_other_pipeline_stages_are_identities() -> None:
    """What the search passes by."""
    for version in (VERSIONS[0], NEWEST):
        sources = (source_of(version) / "sglang/srt/layers").rglob("*.py")
        assert any("class PPMissingLayer(torch.nn.Identity)" in path.read_text() for path in sources)


def test_no_family_is_named_twice() -> None:
    for names in ([family.holder for family in FAMILIES], [family.models for family in FAMILIES]):
        assert len(set(names)) == len(names)


def test_the_state_of_a_model() -> None:
    llama = next(family for family in FAMILIES if family.holder == "llama.LlamaModel")
    assert llama.state("LlamaForCausalLM") == "proved"
    assert llama.state("MistralForCausalLM") == "expected"
    assert next(family for family in FAMILIES if family.refused).state("LlamaForCausalLM") == "refused"


def test_a_class_that_is_derived_from_a_familys_is_told_from_it() -> None:
    holder = type("LlamaModel", (), {"__module__": "sglang.srt.models.llama"})
    family, exact = family_of(holder)
    assert family is not None
    assert (family.holder, exact) == ("llama.LlamaModel", True)
    assert family_of(type("Derived", (holder,), {})) == (family, False)
    assert family_of(dict) == (None, False)


def said(family: Family) -> str:
    """A family's row in the documentation."""
    keywords = "<br>".join(f"`{keyword}` {since}" for keyword, since in family.keywords.items())
    if family.refused:
        state = f"refused: {family.refused}"
    else:
        proved = ", ".join(f"`{name}`" for name in family.proved)
        state = (f"**proved**: {proved}; others expected" if proved else "expected") + (
            f". {family.note[0].upper()}{family.note[1:]}" if family.note else ""
        )
    return f"| {family.models} | `{family.holder}` | {keywords} | {state} |"


def test_the_documentation_has_a_row_for_each_family() -> None:
    page = (DOCS / "models.md").read_text()
    rows = re.findall(r"^\| .* \| `\w+\.\w+` \| .*$", page, re.MULTILINE)
    assert rows == [said(family) for family in FAMILIES]


def test_the_documentation_names_all_others() -> None:
    """SGLang's modules with a language model of their own whose layers take no keyword; drafts and towers are none."""
    source = Models(NEWEST)
    tabled = {name.split(".")[0] for family in FAMILIES for name in (family.holder, *family.layers)}
    found = set()
    for key, cls in source.classes.items():
        own = {
            node.attr for node in ast.walk(cls) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        if "layers" in own and own & EMBEDDINGS and not OTHERS.search(key.split(".")[0]):
            found.add(key.split(".")[0])
    page = (DOCS / "models.md").read_text().partition("## Without a capture keyword")[2]
    assert re.findall(r"`(\w+)`", page.partition("\n\n")[2].partition("\n\n##")[0]) == sorted(found - tabled)
