import os
import zipfile

import pytest
import torch
from factories import make_spec

from sglang_capture.dump import DumpError, DumpFile, load_dump, reserved_bytes


def filled(part, spec, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(spec.vocab_size, (tokens,), generator=generator)
    dump = DumpFile(part, "a", "request-a", spec, ids)
    hidden = torch.randn(tokens, len(spec.layers), spec.hidden_size, generator=generator).to(spec.torch_dtype)
    dump.hidden_states.copy_(hidden)
    last = {}
    for key, place in dump.last_hidden.items():
        last[key] = torch.randn(tokens, spec.hidden_size, generator=generator).to(spec.torch_dtype)
        place.copy_(last[key])
    return dump, ids, hidden, last


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("last_hidden", ["none", "post", "pre", "both"])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_what_was_copied_in_is_what_is_loaded(tmp_path, dtype, last_hidden, tokens):
    spec = make_spec(dtype=dtype, last_hidden=last_hidden)
    dump, ids, hidden, last = filled(tmp_path / ".part-1", spec, tokens)
    assert dump.publish(tmp_path / "a.pt")

    loaded = load_dump(tmp_path / "a.pt")

    assert (loaded.capture_id, loaded.request_id, loaded.spec, loaded.tokens) == ("a", "request-a", spec, tokens)
    assert torch.equal(loaded.input_ids, ids)
    assert torch.equal(loaded.hidden_states, hidden)
    assert loaded.last_hidden.keys() == last.keys()
    assert all(torch.equal(loaded.last_hidden[key], last[key]) for key in last)


def test_torch_alone_reads_a_dump_with_the_documented_keys(tmp_path):
    dump, _, hidden, last = filled(tmp_path / ".part-1", make_spec(), 5)
    dump.publish(tmp_path / "a.pt")
    for mmap in (True, False):
        content = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)
        expected = {"capture_id", "request_id", "input_ids", "hidden_states", "layers", "last_hidden_state", "spec"}
        assert content.keys() == expected
        assert content["layers"] == [3, 31, 59]
        assert torch.equal(content["hidden_states"], hidden)
        assert torch.equal(content["last_hidden_state"], last["last_hidden_state"])


def test_the_size_is_the_payload_and_a_few_kilobytes(tmp_path):
    spec = make_spec(hidden_size=7168)
    dump, *_ = filled(tmp_path / ".part-1", spec, 100)
    dump.publish(tmp_path / "a.pt")
    payload = 100 * spec.bytes_per_token
    found = (tmp_path / "a.pt").stat()
    assert payload < found.st_size < payload + 8192
    assert found.st_blocks * 512 < payload + 16384
    assert found.st_mode & 0o777 == 0o600
    assert reserved_bytes(100, spec) >= found.st_size


def test_nothing_is_visible_before_it_is_published(tmp_path):
    dump, *_ = filled(tmp_path / ".part-1", make_spec(), 5)
    assert [path.name for path in tmp_path.iterdir()] == [".part-1"]
    dump.publish(tmp_path / "a.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_the_first_complete_dump_of_an_id_stands(tmp_path):
    first, _, hidden, _ = filled(tmp_path / ".part-1", make_spec(), 5, seed=1)
    second, *_ = filled(tmp_path / ".part-2", make_spec(), 5, seed=2)
    assert first.publish(tmp_path / "a.pt")
    assert not second.publish(tmp_path / "a.pt")
    assert torch.equal(load_dump(tmp_path / "a.pt").hidden_states, hidden)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_dump_without_room_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        DumpFile(tmp_path / ".part-1", "a", "r", make_spec(), torch.zeros(5, dtype=torch.int64))
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_dump_is_refused(tmp_path):
    dump, *_ = filled(tmp_path / ".part-1", make_spec(), 50)
    dump.publish(tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "b.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DumpError, match=r"b\.pt"):
        load_dump(tmp_path / "b.pt")


def test_tensors_that_contradict_the_spec_are_refused(tmp_path):
    dump, *_ = filled(tmp_path / ".part-1", make_spec(), 5)
    dump.publish(tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    torch.save({**content, "hidden_states": content["hidden_states"][:4].clone()}, tmp_path / "short.pt")
    with pytest.raises(DumpError, match="hidden_states"):
        load_dump(tmp_path / "short.pt")


@pytest.mark.parametrize("content", [[], {"capture_id": "a"}, {"spec": "{}"}])
def test_other_files_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DumpError):
        load_dump(tmp_path / "a.pt")


def test_a_dump_that_is_gone_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_dump(tmp_path / "a.pt")


def test_the_file_is_a_zip_as_torch_writes_it(tmp_path):
    dump, *_ = filled(tmp_path / ".part-1", make_spec(), 5)
    dump.publish(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert any(name.endswith("data.pkl") for name in archive.namelist())


def test_a_pipe_is_no_dump_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(DumpError, match="it is no file"):
        load_dump(tmp_path / "a.pt")


def test_another_kind_of_file_gets_no_advice_of_torchs(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"junk")
    with pytest.raises(DumpError, match=r"a\.pt is no readable dump: another kind of file, or truncated$"):
        load_dump(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "changes", [{"input_ids": "x"}, {"hidden_states": torch.tensor(1)}, {"nonfinite_rows": [1]}, {"spec": "[" * 10**5}]
)
def test_content_of_another_kind_is_refused(tmp_path, changes):
    dump, *_ = filled(tmp_path / ".part-1", make_spec(), 5)
    dump.publish(tmp_path / "a.pt")
    torch.save({**torch.load(tmp_path / "a.pt", weights_only=True), **changes}, tmp_path / "b.pt")
    with pytest.raises(DumpError, match="not a dump of this format"):
        load_dump(tmp_path / "b.pt")


def test_a_dump_that_takes_anothers_name_while_that_is_read_is_not_mixed_with_it(tmp_path, monkeypatch):
    """torch looks at a path twice: first for the records, then for the rows."""
    dump, ids, hidden, _ = filled(tmp_path / ".part-1", make_spec(), 9, seed=1)
    dump.publish(tmp_path / "a.pt")
    from_file = torch.UntypedStorage.from_file

    def exchange_first(*arguments):
        (tmp_path / "a.pt").unlink()
        filled(tmp_path / ".part-2", make_spec(), 30, seed=2)[0].publish(tmp_path / "a.pt")
        return from_file(*arguments)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", exchange_first)
    loaded = load_dump(tmp_path / "a.pt")
    assert torch.equal(loaded.input_ids, ids)
    assert torch.equal(loaded.hidden_states, hidden)
