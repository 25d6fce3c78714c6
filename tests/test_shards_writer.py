"""What a writer leaves behind: whole shards that anything reads, or the dataset as it was."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from factories import make_dataset, make_dump, make_samples, make_spec, save_dump
from safetensors import safe_open

from sglang_capture.dump import load_dump
from sglang_capture.shards import (
    DatasetError,
    DatasetWriter,
    Sample,
    SampleError,
    SpecMismatch,
    check_dataset,
    read_manifest,
)
from sglang_capture.shards import manifest as manifest_module
from sglang_capture.shards import writer as writer_module

SPEC = make_spec()


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".lock"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("last_hidden", ["none", "post", "pre", "both"])
def test_a_shard_is_read_with_nothing_but_safetensors(tmp_path: Path, dtype: str, last_hidden: str) -> None:
    spec = make_spec(dtype=dtype, last_hidden=last_hidden, hidden_size=5)
    samples = make_dataset(tmp_path, spec, [3, 1, 7])
    with safe_open(tmp_path / "shard-000000.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    assert tensors["offsets"].tolist() == [0, 3, 4, 11]
    assert json.loads(metadata["sample_ids"]) == [sample.sample_id for sample in samples]
    assert metadata["spec_digest"] == spec.digest
    assert set(tensors) == {"offsets", "input_ids", "hidden_states", "loss_mask", *spec.last_hidden_keys}
    assert torch.equal(tensors["input_ids"], torch.cat([sample.dump.input_ids for sample in samples]))
    assert torch.equal(tensors["hidden_states"], torch.cat([sample.dump.hidden_states for sample in samples]))
    for key in spec.last_hidden_keys:
        assert torch.equal(tensors[key], torch.cat([sample.dump.last_hidden[key] for sample in samples]))
    assert tensors["loss_mask"].dtype == torch.uint8 and bool((tensors["loss_mask"] == 1).all())


def test_the_manifest_holds_the_totals_and_the_checksum_of_each_file(tmp_path: Path) -> None:
    make_dataset(tmp_path, SPEC, [3, 4], [5])
    content = json.loads((tmp_path / "manifest.json").read_text())
    sizes = [(tmp_path / shard["file"]).stat().st_size for shard in content["shards"]]
    assert (content["format_version"], content["samples"], content["tokens"]) == (1, 3, 12)
    assert content["bytes"] == sum(sizes)
    for shard in content["shards"]:
        assert shard["xxh3_64"] == xxhash.xxh3_64_hexdigest((tmp_path / shard["file"]).read_bytes())


def test_the_manifest_names_each_lineage_of_its_prompts_once(tmp_path: Path) -> None:
    old, new = {"template": "a", "max_length": None}, {"template": "b", "max_length": 9}
    metadata = [{"prompt_lineage": lineage} if lineage else {} for lineage in (old, None, dict(old), new, old)]
    samples = [
        replace(sample, metadata=about) for sample, about in zip(make_samples(SPEC, [2] * 5), metadata, strict=True)
    ]
    with DatasetWriter(tmp_path, SPEC) as writer:
        writer.write_shard(samples[:3])
        writer.write_shard(samples[3:])
    manifest = read_manifest(tmp_path)
    assert [list(shard.prompt_lineages) for shard in manifest.shards] == [[old], [new, old]]
    assert json.loads((tmp_path / "manifest.json").read_text())["prompt_lineages"] == [old, new]


def test_a_lineage_is_looked_at_with_its_own_shard_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is written with each shard: what was found out of earlier ones is not found out again."""
    samples = [replace(one, metadata={"prompt_lineage": {"template": "a"}}) for one in make_samples(SPEC, [2] * 6)]
    looks: list[object] = []
    key = manifest_module._key
    monkeypatch.setattr(manifest_module, "_key", lambda lineage: looks.append(lineage) or key(lineage))
    with DatasetWriter(tmp_path, SPEC) as writer:
        taken = []
        for sample in samples:
            looks.clear()
            writer.write_shard([sample])
            taken.append(len(looks))
    assert taken == [taken[0]] * 6
    assert read_manifest(tmp_path).prompt_lineages == ({"template": "a"},)


def test_mapped_dumps_from_a_spool_are_packed(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    dump = make_dump(SPEC, "one", 6)
    with DatasetWriter(tmp_path / "data", SPEC) as writer:
        writer.write_shard([Sample("one", load_dump(save_dump(spool, dump)))])
    with safe_open(tmp_path / "data/shard-000000.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("hidden_states"), dump.hidden_states)


def test_a_mask_of_any_type_is_kept_as_bytes(tmp_path: Path) -> None:
    masks = [torch.tensor([True, False, True]), torch.tensor([0, 1, 1]), torch.tensor([1.0, 0.0, 0.0])]
    samples = [Sample(f"s{i}", make_dump(SPEC, f"s{i}", 3), loss_mask=mask) for i, mask in enumerate(masks)]
    with DatasetWriter(tmp_path, SPEC) as writer:
        writer.write_shard(samples)
    with safe_open(tmp_path / "shard-000000.safetensors", framework="pt") as file:
        assert file.get_tensor("loss_mask").tolist() == [1, 0, 1, 0, 1, 1, 1, 0, 0]


def test_a_dataset_grows_over_several_writers(tmp_path: Path) -> None:
    for number in range(3):
        with DatasetWriter(tmp_path, SPEC) as writer:
            entry = writer.write_shard(make_samples(SPEC, [2], prefix=f"n{number}-"))
            assert entry.file == f"shard-{number:06d}.safetensors"
            assert writer.shard_of("n0-0") == "shard-000000.safetensors"
            assert writer.shard_of("n9-0") is None
    assert check_dataset(tmp_path, deep=True).samples == 3


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (Sample("../x", make_dump(SPEC, "x", 2)), "sample id"),
        (Sample("x", make_dump(SPEC, "x", 0)), "no token"),
        (Sample("x", make_dump(SPEC, "x", 2), loss_mask=torch.ones(3)), r"shape \[3\].* 2 tokens"),
        (Sample("x", make_dump(SPEC, "x", 2), loss_mask=torch.tensor([0, 2])), "0 and 1 only"),
        (Sample("x", make_dump(SPEC, "x", 2), metadata={"a": object()}), "JSON"),
        (Sample("x", replace(make_dump(SPEC, "x", 2), input_ids=torch.zeros(3, dtype=torch.int64))), "hidden_states"),
        (Sample("s1", make_dump(SPEC, "x", 2)), "already in shard-000000.safetensors"),
        (Sample("new", make_dump(SPEC, "x", 2)), "already in this shard"),
    ],
)
def test_a_bad_sample_is_named_and_nothing_is_written(tmp_path: Path, sample: Sample, told: str) -> None:
    with DatasetWriter(tmp_path, SPEC) as writer:
        writer.write_shard(make_samples(SPEC, [2, 2]))
        before = files(tmp_path), writer.manifest
        with pytest.raises(SampleError, match=told):
            writer.write_shard([Sample("new", make_dump(SPEC, "new", 1)), sample])
        assert (files(tmp_path), writer.manifest) == before


def test_an_empty_shard_is_refused(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, SPEC) as writer, pytest.raises(DatasetError, match="at least one sample"):
        writer.write_shard([])


def test_another_spec_is_refused_with_what_differs(tmp_path: Path) -> None:
    other = make_spec(layers=(2, 30, 58), dtype="float32")
    make_dataset(tmp_path, SPEC, [2])
    with pytest.raises(SpecMismatch, match=r"layers: \(3, 31, 59\) / \(2, 30, 58\); dtype: bfloat16 / float32"):
        DatasetWriter(tmp_path, other)
    with DatasetWriter(tmp_path, SPEC) as writer, pytest.raises(SpecMismatch, match=r"sample x .*layers"):
        writer.write_shard([Sample("x", make_dump(other, "x", 2))])
    assert read_manifest(tmp_path).samples == 1


def test_lineage_that_is_no_identity_may_differ(tmp_path: Path) -> None:
    make_dataset(tmp_path, SPEC, [2])
    with DatasetWriter(tmp_path, make_spec(ranks={"tp": 8}, sglang_version="0.5.23")) as writer:
        writer.write_shard(make_samples(writer.manifest.spec, [2]))
    assert read_manifest(tmp_path).samples == 2


def test_two_writers_are_refused_until_the_first_closes(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, SPEC), pytest.raises(DatasetError, match="another process is writing"):
        DatasetWriter(tmp_path, SPEC)
    DatasetWriter(tmp_path, SPEC).close()


def test_shards_without_their_manifest_are_never_removed(tmp_path: Path) -> None:
    make_dataset(tmp_path, SPEC, [2])
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DatasetError, match=r"no manifest\.json"):
        DatasetWriter(tmp_path, SPEC)
    assert "shard-000000.safetensors" in files(tmp_path)


STEPS = ("_write", "_check_written", "sync_directory", "write_manifest")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_dying_at_any_step_leaves_the_dataset_before_or_after_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    make_dataset(tmp_path, SPEC, [2])
    original = getattr(writer_module, step)

    def die(*args: object) -> None:
        if after:
            original(*args)
        os._exit(9)

    child = os.fork()
    if child == 0:
        with DatasetWriter(tmp_path, SPEC) as writer:
            monkeypatch.setattr(writer_module, step, die)
            writer.write_shard(make_samples(SPEC, [3, 4]))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    samples = check_dataset(tmp_path, deep=True).samples
    assert samples == (3 if (step, after) == ("write_manifest", True) else 1)
    with DatasetWriter(tmp_path, SPEC) as writer:
        assert files(tmp_path) == {"manifest.json", *(shard.file for shard in writer.manifest.shards)}
        writer.write_shard(make_samples(SPEC, [5], prefix="again"))
    assert check_dataset(tmp_path, deep=True).samples == samples + 1


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_leaves_the_dataset_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    make_dataset(tmp_path, SPEC, [2])
    before = files(tmp_path)
    original = getattr(writer_module, step)

    def fail(*args: object) -> None:
        if step != "write_manifest":
            original(*args)
        raise OSError(number, os.strerror(number))

    with DatasetWriter(tmp_path, SPEC) as writer:
        monkeypatch.setattr(writer_module, step, fail)
        with pytest.raises(DatasetError, match="the dataset is unchanged"):
            writer.write_shard(make_samples(SPEC, [3]))
        assert files(tmp_path) == before
        monkeypatch.setattr(writer_module, step, original)
        writer.write_shard(make_samples(SPEC, [3]))
    assert check_dataset(tmp_path, deep=True).samples == 2


def test_a_shard_larger_than_the_free_space_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with DatasetWriter(tmp_path, SPEC) as writer:
        monkeypatch.setattr(writer_module.os, "posix_fallocate", full)
        monkeypatch.setattr(writer_module, "_bytes", lambda _: pytest.fail("rows were read"))
        with pytest.raises(DatasetError, match=r"no room for a shard of [\d,]+ bytes .*No space left.*unchanged"):
            writer.write_shard(make_samples(SPEC, [30]))
    assert files(tmp_path) == {"manifest.json"}


def test_a_shard_goes_to_the_disk_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[int, int]] = []
    monkeypatch.setattr(writer_module, "_FLUSH", 1000)
    monkeypatch.setattr(writer_module, "_BUFFER", 16)
    monkeypatch.setattr(writer_module, "_start_flush", lambda _, begin, end: flushed.append((begin, end)))
    make_dataset(tmp_path, SPEC, [30] * 5)
    begins, ends = zip(*flushed, strict=True)
    assert begins == (0, *ends[:-1]), "every byte once, in order"
    assert all(end - begin >= 1000 for begin, end in flushed)
    assert (tmp_path / "shard-000000.safetensors").stat().st_size - ends[-1] < 5000
    check_dataset(tmp_path, deep=True)


@pytest.mark.parametrize("sizes", [[10], [64], [200], [10, 54, 3, 0, 130], [63, 1, 64, 65], []])
def test_pieces_end_where_the_file_has_a_multiple_of_the_chunk(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(writer_module, "_CHUNK", 64)
    content = bytes(range(256)) * 2
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    buffers = [memoryview(content)[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    pieces = list(writer_module._chunks(buffers))
    assert b"".join(pieces) == content[: sum(sizes)]
    positions = [sum(map(len, pieces[: number + 1])) for number in range(len(pieces))]
    assert all(position % 64 == 0 or position in ends for position in positions)
    assert set(range(64, sum(sizes) + 1, 64)) <= set(positions)
