"""docs/drafts.md says what the tables of the code say."""

from __future__ import annotations

import re

from documents import DOCS

from sglang_capture.drafts.releases import NEWEST, OLDEST
from sglang_capture.drafts.rules import Setter
from sglang_capture.drafts.served import COUNTS_OUTPUTS
from sglang_capture.drafts.setters import DSPARK_SINCE, TABLE, find_setter
from sglang_capture.drafts.trainers import TRAINERS, Trainer

PAGE = (DOCS / "drafts.md").read_text()
NAMES = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark", "eagle": "EAGLE-1, -2"}


def rule_row(rule: Setter) -> str:
    targets = ", ".join(f"`{name}`" for name in rule.architectures)
    releases = f"{rule.since} on" if not rule.until else f"{rule.since}, before {rule.until}"
    meaning = f"**none**: {rule.none}" if rule.none else rule.ids
    if rule.default_added:
        meaning += (
            f"; without ids `[{2 + rule.default_added}, n//2 + {rule.default_added}, n − {3 - rule.default_added}]`"
        )
    if rule.strict:
        meaning += "; must ascend"
    return f"| {NAMES[rule.algorithm]} | {targets} | {releases} | {meaning} | `{rule.source}` |"


def trainer_row(row: Trainer) -> str:
    return f"| {row.name} | {NAMES[row.kind]} | `{row.export}` | {row.needs} | {row.count or 'any'} |"


def test_there_is_a_row_for_each_rule() -> None:
    rows = re.findall(r"^\| (?:EAGLE-3|DFlash|DSpark) \| .*$", PAGE.partition("## The rules")[2], re.MULTILINE)
    assert rows == [rule_row(rule) for rule in TABLE]


def test_there_is_a_row_for_each_trainer() -> None:
    rows = PAGE.partition("## What a trainer needs")[2].partition("|---|---|---|---|---|\n")[2].partition("\n\n")[0]
    assert rows.splitlines() == [trainer_row(row) for row in TRAINERS]


def test_the_releases_are_named() -> None:
    assert f"For SGLang {OLDEST} to {NEWEST}." in PAGE
    assert f"since {DSPARK_SINCE}" in PAGE
    for name, since in COUNTS_OUTPUTS.items():
        assert f"`{name}` (since {since})" in PAGE


def test_the_examples_are_what_the_rules_give() -> None:
    table = PAGE.partition("| ids in the config |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        ids, *answers = (
            re.findall(r"\[[\d, ]+\]", line) if "none" not in line else ["none", *re.findall(r"\[.*?\]", line)]
        )
        for names, answer in zip(
            (("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"), ("LlamaForCausalLM", "Qwen3ForCausalLM")),
            answers,
            strict=True,
        ):
            for name in names:
                rule = find_setter(name, "eagle3", NEWEST)
                assert isinstance(rule, Setter)
                given = None if ids == "none" else [int(number) for number in ids[1:-1].split(",")]
                assert str(list(rule.indices(given, 61))) == answer
