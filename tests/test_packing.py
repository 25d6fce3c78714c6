"""`sglang-capture pack`: a spool into one dataset; what stands in the way is said, and nothing is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import typer
from factories import make_dump, make_spec, save_dump, watch_removals
from typer.testing import CliRunner, Result

from sglang_capture.claim import ServiceClaim
from sglang_capture.commands.pack import pack
from sglang_capture.dump import DumpFile
from sglang_capture.errors import UsageError
from sglang_capture.packing import pack_spool
from sglang_capture.shards import CaptureDataset, SpecMismatch, check_dataset

SPEC = make_spec()
OTHER = make_spec(layers=(2, 30, 58))


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    directory = tmp_path / "spool"
    directory.mkdir()
    for number, name in enumerate("abc"):
        save_dump(directory, make_dump(SPEC, name, 4, seed=number))
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.pt"))


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(pack)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_spool_becomes_a_dataset_and_is_kept(spool: Path, tmp_path: Path) -> None:
    summary = pack_spool(spool, tmp_path / "ds")
    assert (summary.samples, summary.already, summary.skipped) == (3, [], {})
    check_dataset(tmp_path / "ds", deep=True)
    assert CaptureDataset(tmp_path / "ds").ids == ["a", "b", "c"]
    assert names(spool) == ["a", "b", "c"]


def test_dumps_are_removed_once_they_are_packed(spool: Path, tmp_path: Path) -> None:
    pack_spool(spool, tmp_path / "ds", ids=["b"], remove=True)
    assert names(spool) == ["a", "c"]


@pytest.mark.parametrize("of_a_shard", [1, 2, 10])
def test_no_dump_is_mapped_any_more_when_it_is_removed(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_a_shard: int
) -> None:
    removed = watch_removals(monkeypatch)
    pack_spool(spool, tmp_path / "ds", remove=True, most_bytes=of_a_shard * 4 * SPEC.bytes_per_token)
    assert removed == {"a": False, "b": False, "c": False}


def test_a_shard_holds_no_more_than_asked_for(spool: Path, tmp_path: Path) -> None:
    summary = pack_spool(spool, tmp_path / "ds", most_bytes=2 * 4 * SPEC.bytes_per_token)
    assert [shard.samples for shard in summary.shards] == [2, 1]


def test_packing_goes_on_after_an_interruption(spool: Path, tmp_path: Path) -> None:
    pack_spool(spool, tmp_path / "ds", ids=["a"])
    summary = pack_spool(spool, tmp_path / "ds", remove=True)
    assert (summary.samples, summary.already) == (2, ["a"])
    assert CaptureDataset(tmp_path / "ds").ids == ["a", "b", "c"]
    assert names(spool) == []


def test_another_capture_of_the_same_id_is_kept_and_told(spool: Path, tmp_path: Path) -> None:
    pack_spool(spool, tmp_path / "ds")
    save_dump(spool, make_dump(SPEC, "a", 4, seed=9))
    summary = pack_spool(spool, tmp_path / "ds", remove=True)
    assert "another capture of this id" in summary.skipped["a"]
    assert names(spool) == ["a"]


def test_mixed_specs_are_refused_and_listed(spool: Path, tmp_path: Path) -> None:
    save_dump(spool, make_dump(OTHER, "d", 4))
    with pytest.raises(
        UsageError, match=r"2 different specs.*layers: .*3 like a: layers \[3, 31, 59\].*1 like d"
    ) as told:
        pack_spool(spool, tmp_path / "ds")
    assert "--id" in str(told.value)
    assert not (tmp_path / "ds").exists()


def test_a_dataset_of_another_spec_is_refused(spool: Path, tmp_path: Path) -> None:
    pack_spool(spool, tmp_path / "ds")
    save_dump(spool, make_dump(OTHER, "d", 4))
    with pytest.raises(SpecMismatch):
        pack_spool(spool, tmp_path / "ds", ids=["d"])


def test_a_dump_that_cannot_be_read_is_left_out(spool: Path, tmp_path: Path) -> None:
    (spool / "broken.pt").write_bytes(b"?")
    summary = pack_spool(spool, tmp_path / "ds", remove=True)
    assert summary.samples == 3
    assert "no readable dump" in summary.skipped["broken"]
    assert names(spool) == ["broken"]


def test_the_command_tells_what_it_packed(spool: Path, tmp_path: Path) -> None:
    result = run(spool, tmp_path / "ds", "--id", "a", "--id", "b", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert (told["samples"], told["already"], told["skipped"]) == (2, [], {})
    assert told["shards"][0]["file"] == "shard-000000.safetensors"
    assert "1 sample, 4 tokens" in run(spool, tmp_path / "ds").stdout


def test_the_command_fails_where_a_dump_was_left_out(spool: Path, tmp_path: Path) -> None:
    (spool / "broken.pt").write_bytes(b"?")
    result = run(spool, tmp_path / "ds")
    assert result.exit_code == 1
    assert "broken: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["SPOOL", "DS", "--id", "nobody"], "has no nobody.pt"),
        (["SPOOL/nowhere", "DS"], "there is no spool"),
        (["DS", "DS"], "holds no dump"),
        (["SPOOL", "DS", "--shard-size", "much"], "--shard-size must be a size like 1GiB"),
    ],
)
def test_wrong_use_is_told(spool: Path, tmp_path: Path, arguments: list[str], what: str) -> None:
    (tmp_path / "ds").mkdir()
    places = {"SPOOL": str(spool), "DS": str(tmp_path / "ds")}
    filled = [argument.replace("SPOOL", places["SPOOL"]).replace("DS", places["DS"]) for argument in arguments]
    error = run(*filled).exception
    assert isinstance(error, UsageError)
    assert what in str(error)


def test_a_label_goes_with_the_sample_and_nan_is_equal_to_itself(tmp_path):
    spool = tmp_path / "spool"
    spool.mkdir()
    part = spool / ".part-1"
    dump = DumpFile(part, "a", "request-a", make_spec(), torch.arange(4), labelled=True)
    dump.hidden_states.fill_(float("nan"))
    dump.last_hidden["last_hidden_state"].fill_(1)
    dump.label(nonfinite=4, zero=0)
    assert dump.publish(spool / "a.pt")
    pack_spool(spool, tmp_path / "dataset")
    assert CaptureDataset(tmp_path / "dataset").metadata(0) == {"nonfinite_rows": 4}
    assert pack_spool(spool, tmp_path / "dataset").already == ["a"]


def test_a_spool_that_a_service_reads_is_left_to_it(spool: Path, tmp_path: Path) -> None:
    spool.chmod(0o700)
    claim = ServiceClaim(spool)
    claim.hold()
    with pytest.raises(UsageError, match=rf"a side service \(process {os.getpid()}\) reads the spool"):
        pack_spool(spool, tmp_path / "ds")
    claim.close()
    assert pack_spool(spool, tmp_path / "ds").samples == 3
