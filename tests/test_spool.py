import errno

import pytest

from sglang_capture import spool
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
