"""The documentation agrees with the code. (The command's options: test_cli.py; the service: service/test_docs.py.)"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from documents import COMMANDS, DOCS, PAGES, ROOT, check_command, commands_in, fenced, prose, unknown_variables
from factories import make_spec
from pydantic import BaseModel
from sglang_capture_patches import contract, families

from sglang_capture.dump import DumpFile
from sglang_capture.layers import default_layers, eagle3_layers, output_of
from sglang_capture.settings import PluginSettings, variable
from sglang_capture.spec import CaptureSpec
from sglang_capture.spool import Counts, Failure, SpoolStatus

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def rows(page: Path, header: str, *, heading: str = "# ") -> dict[str, str]:
    """The table below a heading whose first column has this header: by name, what the other columns say."""
    text = page.read_text().partition(heading)[2]
    lines = iter(text.partition(f"\n| {header} |")[2].splitlines()[2:])
    found = {}
    for line in lines:
        if not (row := re.fullmatch(r"\| `(\w+)` \| (.*) \|", line)):
            break
        found[row[1]] = row[2]
    return found


def shown(default: object) -> str:
    """A default as the table has it."""
    if default is None or default == "":
        return "unset"
    return f"`{int(default) if isinstance(default, bool) else default}`"


def test_every_setting_of_the_plugin_is_in_the_table_with_its_default_and_meaning() -> None:
    fields = PluginSettings.model_fields
    assert rows(DOCS / "settings.md", "variable") == {
        variable(name): f"{shown(field.default)} | {field.description}" for name, field in fields.items()
    }


@pytest.mark.parametrize(
    ("model", "header", "heading"),
    [
        (CaptureSpec, "field", "### The spec"),
        (Failure, "field", "## A failure"),
        (SpoolStatus, "field", "## The status"),
        (Counts, "in `counts`", "## The status"),
    ],
)
def test_every_field_that_others_read_is_documented(model: type[BaseModel], header: str, heading: str) -> None:
    documented = rows(DOCS / "dump.md", header, heading=heading)
    assert list(documented) == list(model.model_fields)
    for name, field in model.model_fields.items():
        assert documented[name] == (field.description or documented[name]), name


def test_the_keys_of_a_dump_are_documented(tmp_path: Path) -> None:
    part = tmp_path / ".part-1"
    DumpFile(part, "a", "request-a", make_spec(last_hidden="both"), torch.arange(3), labelled=True)
    assert set(rows(DOCS / "dump.md", "key")) == torch.load(part, weights_only=True).keys()


def test_the_readme_begins_with_what_it_is_for_and_the_two_commands() -> None:
    _title, purpose, commands = (ROOT / "README.md").read_text().split("\n\n")[:3]
    assert len(re.findall(r"\.(?=\s|$)", purpose)) == 3
    assert re.findall(r"^make \w+", commands, re.MULTILINE) == ["make demo", "make test"]


def test_the_readme_knows_the_default_layers_and_the_bytes_of_a_token() -> None:
    readme = (ROOT / "README.md").read_text()
    kimi = make_spec(layers=default_layers(61), hidden_size=7168, dtype="bfloat16", last_hidden="post")
    assert f"= {kimi.bytes_per_token:,} bytes" in readme
    for layers in (default_layers(61), eagle3_layers(61)):
        assert f"| `{list(layers)}` | `{list(output_of(layers))}` |" in readme


def test_every_page_is_in_the_index() -> None:
    index = prose(DOCS / "README.md")
    assert [
        page.name for page in DOCS.glob("*.md") if f"]({page.name})" not in index and page.name != "README.md"
    ] == []


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_every_command_is_one_that_the_command_line_takes(page: Path) -> None:
    for language in ("bash", ""):
        for code in fenced(page, language):
            for words in commands_in(code.replace("…", "X")):
                check_command(words)
    for name in re.findall(r"`sglang-capture ([a-z][a-z-]*)", prose(page)):
        assert name in COMMANDS


@every_page
def test_every_variable_is_one_that_is_read(page: Path) -> None:
    assert unknown_variables(page.read_text()) == set()


@every_page
def test_python_in_the_pages_is_python(page: Path) -> None:
    for code in fenced(page, "python"):
        compile(code, str(page), "exec")


def test_every_page_that_the_code_names_is_there() -> None:
    sources = [*ROOT.glob("sglang_capture/**/*.py"), *ROOT.glob("patches/**/*.py")]
    names = {name for source in sources for name in re.findall(r"docs/[\w-]+\.md", source.read_text())}
    assert names
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []


def test_what_is_hooked_read_and_refused_is_documented() -> None:
    page = (DOCS / "compatibility.md").read_text()
    assert contract.OLDEST in page
    assert contract.NEWEST_TESTED in page
    assert all(keyword in page for keyword in families.KEYWORDS)
    for need in (*contract.HOOKED, *contract.READ):
        owner, name = need.target.split(".")[-2:]
        assert f"`{owner}.{name}`" in page or f"`{name}`" in page, need.target
    flags = [flag for _, _, message in contract.REFUSED for flag in re.findall(r"--[a-z-]+", message)]
    assert len(flags) == len(contract.REFUSED)
    assert [flag for flag in flags if flag not in page] == []


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs a git checkout")
def test_no_tracked_file_names_a_directory_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert files
    private = re.compile(r"(?<![\w.<}])/(?:work|root|home|Users)/")
    found = [str(file.relative_to(ROOT)) for file in files if file.is_file() and private.search(file.read_text())]
    assert found == []
