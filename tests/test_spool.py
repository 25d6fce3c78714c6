import errno
import os

import pytest

from sglang_capture import spool
from sglang_capture.small_files import MOST_BYTES
from sglang_capture.spool import STATUS_NAME, SpoolStatus, read_status, write_status


def make_status(time=1.0, last_error=""):
    return SpoolStatus(
        state="capturing",
        pid=1,
        rank="dp0-pp0-tp0",
        writer=True,
        mode="marked",
        quota_bytes=0,
        used_bytes=0,
        free_bytes=0,
        on_full="refuse",
        last_error=last_error,
        started=0.0,
        time=time,
    )


@pytest.fixture
def full(monkeypatch):
    """No new file can be made."""

    def no_room(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda: monkeypatch.setattr(spool.tempfile, "mkstemp", no_room)


def test_on_a_full_file_system_the_status_stays_fresh(tmp_path, full):
    path = tmp_path / STATUS_NAME
    write_status(path, make_status(last_error="a long error " * 9, time=1.0))
    full()
    for time, error in ((2.0, ""), (3.0, "another " * 40)):
        write_status(path, make_status(last_error=error, time=time))
        found = read_status(tmp_path)
        assert (found.time, found.last_error) == (time, error)


def test_a_first_status_that_has_no_room_is_an_error(tmp_path, full):
    full()
    with pytest.raises(OSError, match="No space left"):
        write_status(tmp_path / STATUS_NAME, make_status())


def test_an_error_that_is_no_want_of_room_is_told(tmp_path):
    write_status(tmp_path / STATUS_NAME, make_status())
    with pytest.raises(OSError, match="No such file"):
        write_status(tmp_path / "gone" / STATUS_NAME, make_status())


@pytest.fixture(params=["pipe", "link to a pipe", "device", "too large", "too deep", "no JSON"])
def strange(request, tmp_path):
    """A file that is no status, where one is expected."""
    path = tmp_path / STATUS_NAME
    if request.param in ("pipe", "link to a pipe"):
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe") if "link" in request.param else (tmp_path / "pipe").rename(path)
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        padding = b" " * MOST_BYTES
        contents = {"too large": make_status().model_dump_json().encode() + padding, "too deep": b"[" * 10**5}
        path.write_bytes(contents.get(request.param, b"?"))
    return path


def test_what_is_no_status_is_none_and_stops_nobody(tmp_path, strange):
    assert read_status(tmp_path) is None
    assert spool.read_failure(strange) is None


def test_only_regular_files_are_dumps(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "directory.pt").mkdir()
    (tmp_path / "loop.pt").symlink_to(tmp_path / "loop.pt")
    (tmp_path / "a.pt").touch()
    assert [path.name for path in spool.dumps(tmp_path)] == ["a.pt"]


def test_one_look_tells_dumps_and_failures_apart_from_everything_else(tmp_path, monkeypatch):
    names = ["a.pt", "b.failed.json", "c.pt", "c.failed.json", "sp ace.pt", ".part-x.pt", "status.json", "notes.txt"]
    for name in [*names, f"{spool.PROBE_PREFIX}1.pt"]:
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe.pt")
    looks, look = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or look(path))
    assert spool.ids(tmp_path) == ({"a", "c"}, {"b", "c"})
    assert looks == [tmp_path]


def test_where_there_is_no_spool_no_probe_is_to_be_cleared(tmp_path):
    spool.clear_probes(tmp_path / "gone")
