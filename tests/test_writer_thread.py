import errno
import itertools
import logging

from sglang_capture.writer_thread import WriterThread


def test_an_error_that_comes_again_is_logged_once_and_another_at_once(caplog):
    errors, told = itertools.count(), []

    def no_room():
        raise OSError(errno.ENOSPC, "No space left on device", f".status-{next(errors)}.tmp")

    def other():
        raise ValueError("another fault")

    thread = WriterThread(lambda: None, lambda: False, told.append)
    with caplog.at_level(logging.ERROR):
        for task in (no_room, no_room, no_room, other):
            thread.submit(task)
        thread.close()
    assert len(told) == 4
    logged = [record.exc_info[1] for record in caplog.records]
    assert [type(error) for error in logged] == [OSError, ValueError]
