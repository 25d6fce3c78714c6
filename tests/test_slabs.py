import contextlib
import subprocess
import sys

import pytest
import torch
from factories import make_spec
from recording import assert_dump_holds, hand_over, request, rows, wait_for

from sglang_capture import slabs
from sglang_capture.claim import claim_spool, clear_after_death
from sglang_capture.dump import load_dump
from sglang_capture.quota import in_pages
from sglang_capture.slabs import hand_back as hand_back_inode

SPEC = make_spec(hidden_size=256, last_hidden="both")
TOKENS = 200
"""512,000 bytes: worth keeping."""


@pytest.fixture
def spool(shared_memory):
    """A directory in shared memory that a server has claimed."""
    directory = shared_memory / "spool"
    with contextlib.closing(claim_spool(directory, "server")):
        yield directory


@pytest.fixture
def recorder(spool, make_recorder):
    return make_recorder(directory=spool, limit=1 << 30)


def captured(recorder, name, tokens=TOKENS, seed=0):
    """Capture, wait until it is published, and give its content."""
    content = rows(tokens, SPEC, seed)
    published = recorder.counts.published
    hand_over(recorder, recorder.begin(request(name, tokens, spec=SPEC)), content, 0, tokens)
    wait_for(lambda: recorder.counts.published > published)
    return content


def inode(spool, name):
    return (spool / f"{name}.pt").stat().st_ino


def hand_back(spool, name):
    hand_back_inode(spool, name, inode(spool, name))


def held(spool):
    sizes = [path.stat().st_size for path in spool.rglob("*") if path.is_file()]
    return sum(in_pages(size) for size in sizes if size > 9999)


def test_a_dump_that_was_handed_back_is_the_next_one(spool, recorder):
    captured(recorder, "a", seed=1)
    first = inode(spool, "a")
    hand_back(spool, "a")
    assert not (spool / "a.pt").exists()
    content = captured(recorder, "b", seed=2)
    assert inode(spool, "b") == first
    assert_dump_holds(spool / "b.pt", content)
    assert recorder.counts.reused == 1
    assert recorder.account.used == held(spool) == in_pages((spool / "b.pt").stat().st_size)


@pytest.mark.parametrize("tokens", [TOKENS * 2 // 3, TOKENS - 1, TOKENS + 1, TOKENS * 3 // 2])
def test_a_file_is_made_shorter_or_longer_for_the_next_capture(spool, recorder, tokens):
    captured(recorder, "a", seed=1)
    first = inode(spool, "a")
    hand_back(spool, "a")
    content = captured(recorder, "b", tokens, seed=2)
    assert inode(spool, "b") == first
    assert_dump_holds(spool / "b.pt", content)
    assert torch.load(spool / "b.pt", weights_only=True)["hidden_states"].shape[0] == tokens
    assert (spool / "b.pt").stat().st_size < tokens * SPEC.bytes_per_token + 10_000
    assert recorder.account.used == held(spool)


@pytest.mark.parametrize("tokens", [TOKENS // 3, TOKENS * 3])
def test_a_file_of_quite_another_size_is_not_taken(spool, recorder, tokens):
    captured(recorder, "a")
    first = inode(spool, "a")
    hand_back(spool, "a")
    captured(recorder, "b", tokens)
    assert inode(spool, "b") != first
    assert recorder.slabs.idle_bytes > 0


def test_who_still_reads_a_dump_never_sees_another_ones_rows(spool, recorder):
    """Neither with our reader nor with torch's own, mapped or open."""
    content = captured(recorder, "a", seed=1)
    kept = load_dump(spool / "a.pt")
    hand_back(spool, "a")
    captured(recorder, "b", seed=2)
    assert recorder.counts.reused == 0
    assert torch.equal(kept.hidden_states[:, 0], content[3])
    del kept
    captured(recorder, "c", seed=3)
    assert recorder.counts.reused == 1  # the file of a, which nobody reads any more


def test_who_keeps_a_dump_under_another_name_keeps_its_rows(spool, recorder, shared_memory):
    content = captured(recorder, "a", seed=1)
    (shared_memory / "mine.pt").hardlink_to(spool / "a.pt")
    hand_back(spool, "a")
    captured(recorder, "b", seed=2)
    assert_dump_holds(shared_memory / "mine.pt", content)


def test_many_rounds_of_many_sizes_keep_every_row(spool, recorder):
    generator = torch.Generator().manual_seed(0)
    for number in range(60):
        tokens = int(torch.randint(120, 400, (1,), generator=generator))
        names = [f"{number}-{part}" for part in range(3)]
        contents = [captured(recorder, name, tokens + 7 * part, seed=number) for part, name in enumerate(names)]
        for name, content in zip(names, contents, strict=True):
            assert_dump_holds(spool / f"{name}.pt", content)
        assert recorder.account.used == held(spool)
        for name in names:
            hand_back(spool, name)
    assert recorder.counts.reused > 150


def test_a_dump_that_is_just_removed_is_gone_with_its_memory(spool, recorder):
    captured(recorder, "a")
    (spool / "a.pt").unlink()
    recorder.slabs.tidy()
    recorder.account.look()
    assert (recorder.account.used, recorder.slabs._kept) == (0, {})


def test_somebody_who_removes_what_waits_for_use_costs_no_capture(spool, recorder):
    captured(recorder, "a")
    hand_back(spool, "a")
    recorder.slabs.tidy()
    (idle,) = spool.glob(".part-*-idle-*")
    idle.unlink()
    content = captured(recorder, "b", seed=2)
    assert_dump_holds(spool / "b.pt", content)
    recorder.slabs.tidy()
    assert recorder.account.used == held(spool)


def test_something_else_in_the_place_of_what_is_handed_back_costs_no_capture(spool, recorder):
    (spool / ".free").touch()
    captured(recorder, "a")
    hand_back(spool, "a")
    content = captured(recorder, "b", seed=2)
    assert_dump_holds(spool / "b.pt", content)
    recorder.account.look()
    assert (recorder.counts.failed, recorder.account.used) == (0, held(spool))


def test_idle_pages_give_way_to_what_needs_them(spool, make_recorder):
    size = in_pages(TOKENS * SPEC.bytes_per_token + 16384)
    recorder = make_recorder(directory=spool, limit=4 * size)
    captured(recorder, "a")
    hand_back(spool, "a")
    content = captured(recorder, "b", TOKENS * 7 // 2)
    assert_dump_holds(spool / "b.pt", content)
    assert recorder.slabs.idle_bytes == 0
    assert recorder.account.used == held(spool) <= recorder.account.limit


def test_idle_pages_are_given_up_after_a_while(spool, recorder, monkeypatch):
    captured(recorder, "a")
    hand_back(spool, "a")
    recorder.slabs.tidy()
    assert recorder.slabs.idle_bytes > 0
    monkeypatch.setattr(slabs, "IDLE_SECONDS", 0.0)
    recorder.slabs.tidy()
    assert recorder.slabs.idle_bytes == recorder.account.used == held(spool) == 0


def test_no_more_is_idle_than_a_part_of_the_quota(spool, make_recorder):
    size = in_pages(TOKENS * SPEC.bytes_per_token + 16384)
    recorder = make_recorder(directory=spool, limit=8 * size)
    for number in range(7):
        captured(recorder, f"a{number}")
    for number in range(7):
        hand_back(spool, f"a{number}")
    recorder.slabs.tidy()
    assert 3 * size <= recorder.slabs.idle_bytes <= 4 * size
    assert recorder.account.used == recorder.slabs.idle_bytes == held(spool)


def test_another_dump_that_has_the_name_by_now_is_not_handed_back(spool, recorder):
    captured(recorder, "a", seed=1)
    packed = inode(spool, "a")
    (spool / "a.pt").unlink()
    content = captured(recorder, "a", seed=2)
    hand_back_inode(spool, "a", packed)
    assert_dump_holds(spool / "a.pt", content)


def test_small_dumps_are_not_kept(spool, recorder):
    captured(recorder, "a", 10)
    assert recorder.slabs._kept == {}


def test_without_a_server_a_dump_that_is_handed_back_is_removed(spool, shared_memory, recorder):
    captured(recorder, "a")
    other = shared_memory / "other"
    claim_spool(other, "dead").close()
    (other / ".free").mkdir()
    (spool / "a.pt").rename(other / "a.pt")
    hand_back(other, "a")
    assert list(other.rglob("*.pt")) == []


def test_what_no_rank_has_kept_is_removed(spool, recorder, monkeypatch):
    captured(recorder, "a")
    (spool / "old.pt").write_bytes(bytes(10))
    hand_back(spool, "old")
    recorder.slabs.tidy()
    assert (spool / ".free/old.pt").exists()  # it may be another rank's
    monkeypatch.setattr(slabs, "STRAY_SECONDS", 0.0)
    recorder.slabs.tidy()
    assert not (spool / ".free/old.pt").exists()


def test_what_a_killed_server_kept_is_cleared_by_whoever_notices(shared_memory, make_recorder):
    spool = shared_memory / "spool"
    claim = claim_spool(spool, "server")
    recorder = make_recorder(directory=spool, limit=1 << 30)
    captured(recorder, "a")
    captured(recorder, "b")
    hand_back(spool, "a")
    clear_after_death(spool)
    assert recorder.slabs.idle_bytes == 0
    assert len(list(spool.rglob("*.pt"))) == 2
    claim.close()
    clear_after_death(spool)
    assert [path.name for path in spool.rglob("*.pt")] == ["b.pt"]


OPENED_ALL_THE_TIME = """
import subprocess, sys
from pathlib import Path
from sglang_capture.mapped_file import MappedFile

path = Path(sys.argv[1])
file = MappedFile.create(path)
file.end_at(4096)
loop = "import os, sys\\nparent = os.getppid()\\nwhile os.getppid() == parent: open(sys.argv[1]).close()"
opener = subprocess.Popen([sys.executable, "-c", loop, str(path)])
try:
    said = {file.mine_alone() for _ in range(20_000)}
finally:
    opener.kill()
print(sorted(said))
"""


def test_somebody_who_opens_the_file_in_that_very_moment_does_not_end_the_server(shared_memory):
    """The kernel tells the holder of a lease by a signal, whose default ends a process."""
    command = [sys.executable, "-c", OPENED_ALL_THE_TIME, str(shared_memory / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[False, True]"), done.stderr
