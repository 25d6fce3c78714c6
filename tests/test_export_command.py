"""The command `export`: what it prints where, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from factories import make_dataset, make_dump, make_samples, make_spec
from typer.testing import CliRunner, Result

from sglang_capture.commands.export import export
from sglang_capture.errors import UsageError
from sglang_capture.shards import DatasetWriter, Sample

SPEC = make_spec()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "data", SPEC, [3, 4])
    return tmp_path / "data"


def run(dataset: Path, *options: str) -> Result:
    app = typer.Typer()
    app.command()(export)
    return CliRunner().invoke(app, [str(dataset), str(dataset.parent / "out"), "--to", "specforge", *options])


def test_json_is_one_object_on_stdout(dataset: Path) -> None:
    result = run(dataset, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["samples"] == 2


def test_people_get_the_counts_and_the_notes(dataset: Path) -> None:
    result = run(dataset)
    assert result.exit_code == 0
    assert "2 samples in" in result.stdout and "2 written, 0 kept" in result.stdout
    assert "eagle_aux_hidden_state_layer_ids" in result.stdout
    assert "0 written, 2 kept" in run(dataset).stdout


def test_skipped_samples_are_told_and_fail_the_command(tmp_path: Path) -> None:
    bad = make_dump(SPEC, "bad", 2)
    bad.hidden_states[1] = float("nan")
    with DatasetWriter(tmp_path / "data", SPEC) as writer:
        writer.write_shard([Sample("bad", bad), *make_samples(SPEC, [2])])
    result = run(tmp_path / "data")
    assert result.exit_code == 1
    assert "skipped bad: hidden_states holds NaN or Inf, first in row 1" in result.stderr
    assert json.loads(run(tmp_path / "data", "--json").stdout)["skipped"][0]["sample_id"] == "bad"


@pytest.mark.parametrize("form", ["commas", "file"])
def test_ids_come_with_commas_or_from_a_file(dataset: Path, tmp_path: Path, form: str) -> None:
    (tmp_path / "ids.txt").write_text("shard0-1\n\nshard0-0\n")
    ids = "shard0-1, shard0-0" if form == "commas" else f"@{tmp_path / 'ids.txt'}"
    assert json.loads(run(dataset, "--json", "--ids", ids).stdout)["samples"] == 2
    assert json.loads(run(dataset, "--json", "--ids", "shard0-1").stdout)["samples"] == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--ids", ","], "names no sample"),
        (["--ids", "@absent.txt"], "expected a text file"),
        (["--ids", "nobody"], "not in"),
        (["--to", "spectral"], "unknown export format"),
        (["--fp8"], "specforge takes no --fp8"),
    ],
)
def test_wrong_use_is_a_usage_error(dataset: Path, options: list[str], told: str) -> None:
    result = run(dataset, *options)
    assert isinstance(result.exception, UsageError) and told in str(result.exception)


def test_options_reach_the_format(dataset: Path) -> None:
    options = ["--to", "angelslim", "--draft-vocab-size", "9", "--seq-length", "3", "--model", str(dataset)]
    summary = json.loads(run(dataset, "--json", *options).stdout)
    assert "1 of 2 samples were cut to their first 3 tokens" in summary["notes"]
    lineage = json.loads((dataset.parent / "out/sglang_capture_export.json").read_text())
    assert lineage["options"] == {"model": str(dataset), "draft_vocab_size": 9, "seq_length": 3, "fp8": False}


def test_help_has_an_example(dataset: Path) -> None:
    assert "sglang-capture export captures --to specforge" in " ".join(run(dataset, "--help").stdout.split())


@pytest.mark.parametrize("option", ["--verify-with", "--model"])
def test_a_model_that_is_not_there_is_named_before_anything_is_written(dataset: Path, option: str) -> None:
    result = run(dataset, option, str(dataset / "gone"))
    assert isinstance(result.exception, UsageError)
    assert f"there is no directory {dataset / 'gone'}; {option} takes" in str(result.exception)
    assert not (dataset.parent / "out").exists()
