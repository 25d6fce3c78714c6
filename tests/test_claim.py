import multiprocessing
import os
import signal

import pytest

from sglang_capture.claim import ServiceClaim, claim_spool, service_on
from sglang_capture.spool import SpoolError, open_directory

SPAWN = multiprocessing.get_context("spawn")


def hold(directory, server_id, ready):
    claim_spool(directory, server_id)
    ready.set()
    signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the spool for the server ``one``."""
    ready = SPAWN.Event()
    process = SPAWN.Process(target=hold, args=(tmp_path / "spool", "one", ready), daemon=True)
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_the_spool_is_made_private(tmp_path):
    claim_spool(tmp_path / "a" / "spool", "one").close()
    assert (tmp_path / "a" / "spool").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "spool" / ".lock").stat().st_mode & 0o777 == 0o600


def test_a_second_server_is_refused_and_told_what_to_do(tmp_path, holder):
    with pytest.raises(SpoolError, match=f"process {holder.pid}.*SGLANG_CAPTURE_DIR"):
        claim_spool(tmp_path / "spool", "two")


def test_another_rank_of_the_same_server_joins(tmp_path, holder):
    (tmp_path / "spool" / ".part-of-the-first").touch()
    claim = claim_spool(tmp_path / "spool", "one")
    assert not claim.first
    assert (tmp_path / "spool" / ".part-of-the-first").exists()
    claim.close()


def test_after_a_crash_unfinished_files_go_and_published_ones_stay(tmp_path, holder):
    spool = tmp_path / "spool"
    (spool / ".part-1").write_bytes(b"half")
    (spool / "sglang-capture-probe-1.pt").write_bytes(b"a look that was never finished")
    (spool / "whole.pt").write_bytes(b"whole")
    (spool / "bad.failed.json").write_text("{}")
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()

    claim = claim_spool(spool, "two")

    assert claim.first
    assert {path.name for path in spool.iterdir()} == {"whole.pt", "bad.failed.json", ".lock"}
    claim.close()


def test_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "spool").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpoolError, match="link"):
        claim_spool(tmp_path / "spool", "one")


def test_a_file_is_refused(tmp_path):
    (tmp_path / "spool").touch()
    with pytest.raises(SpoolError, match="directory of its own"):
        open_directory(tmp_path / "spool")


def test_somebody_elses_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "spool").mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SpoolError, match="belongs to user"):
        open_directory(tmp_path / "spool")


def test_a_directory_that_others_may_write_is_refused(tmp_path):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool").chmod(0o777)
    with pytest.raises(SpoolError, match="chmod 700"):
        open_directory(tmp_path / "spool")


def test_a_spool_that_is_not_there_says_so(tmp_path):
    with pytest.raises(SpoolError, match="there is no spool"):
        open_directory(tmp_path / "spool", create=False)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "spool").mkdir(mode=0o700)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "spool" / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(SpoolError):
        claim_spool(tmp_path / "spool", "one")
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_claim_ends_when_the_directory_is_moved_away_or_made_anew(tmp_path):
    spool = tmp_path / "spool"
    claim = claim_spool(spool, "one")
    assert claim.held
    spool.rename(tmp_path / "away")
    assert not claim.held
    other = claim_spool(spool, "two")
    assert other.held and not claim.held
    claim.close()
    other.close()


def test_a_spool_has_one_service_beside_its_server(tmp_path, holder):
    first, second = ServiceClaim(tmp_path / "spool"), ServiceClaim(tmp_path / "spool")
    assert service_on(tmp_path / "spool") is None
    first.hold()
    first.hold()
    assert service_on(tmp_path / "spool") == str(os.getpid())
    with pytest.raises(SpoolError, match=rf"another side service \(process {os.getpid()}\) reads.*--spool"):
        second.hold()
    first.close()
    assert service_on(tmp_path / "spool") is None
    second.hold()
    second.close()


def test_a_spool_made_anew_is_claimed_anew(tmp_path):
    spool = tmp_path / "spool"
    claim = ServiceClaim(spool)
    with pytest.raises(SpoolError, match="there is no spool"):
        claim.hold()
    for name in ("first", "second"):
        spool.mkdir(mode=0o700)
        claim.hold()
        assert service_on(spool)
        spool.rename(tmp_path / name)
    claim.close()


def test_no_two_starts_of_a_server_have_the_same_name_and_its_processes_share_it(tmp_path):
    """One Python process may start engines one after the other, all of one server id."""
    first, joined = claim_spool(tmp_path / "spool", "one"), claim_spool(tmp_path / "spool", "one")
    assert first.start == joined.start
    first.close()
    joined.close()
    assert claim_spool(tmp_path / "spool", "one").start != first.start
