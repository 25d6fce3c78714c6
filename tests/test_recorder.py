import errno
import threading
import time

import pytest
import torch
from recording import SPEC, assert_dump_holds, hand_over, request, rows

from sglang_capture import failure_log, writer_thread
from sglang_capture.coverage import Coverage
from sglang_capture.dump import reserved_bytes
from sglang_capture.quota import in_pages
from sglang_capture.spool import SPOOL_FULL, failure_path, read_failure

ROOM_FOR_ONE = in_pages(reserved_bytes(10, SPEC))


@pytest.mark.parametrize("chunks", [[(0, 10)], [(0, 4), (4, 8), (8, 10)], [(6, 10), (0, 6)], [(0, 6), (0, 6), (4, 10)]])
def test_chunks_in_any_order_become_one_dump(tmp_path, make_recorder, chunks):
    recorder, content = make_recorder(), rows(10)
    capture = recorder.begin(request())
    for start, stop in chunks:
        assert not (tmp_path / "a.pt").exists()
        hand_over(recorder, capture, content, start, stop)
    recorder.close()
    assert_dump_holds(tmp_path / "a.pt", content)
    assert (recorder.counts.published, recorder.counts.tokens) == (1, 10)
    assert recorder.account.used == in_pages((tmp_path / "a.pt").stat().st_size)


def test_captures_filled_at_the_same_time_keep_apart(tmp_path, make_recorder):
    recorder = make_recorder()
    captures = [(recorder.begin(request(f"c{i}", 10 + i)), rows(10 + i, seed=i)) for i in range(20)]
    for start in range(0, 30, 3):
        for capture, content in captures:
            stop = min(start + 3, capture.request.tokens)
            if start < stop:
                hand_over(recorder, capture, content, start, stop)
    recorder.close()
    for number, (_, content) in enumerate(captures):
        assert_dump_holds(tmp_path / f"c{number}.pt", content)


def test_a_full_spool_refuses_and_says_that_trying_again_may_help(tmp_path, make_recorder):
    recorder = make_recorder(limit=ROOM_FOR_ONE)
    hand_over(recorder, recorder.begin(request("a")), rows(10), 0, 10)
    refused = recorder.begin(request("b"))
    hand_over(recorder, refused, rows(10), 0, 10)
    recorder.close()
    failure = read_failure(failure_path(tmp_path, "b"))
    assert failure.reason.startswith(SPOOL_FULL)
    assert failure.retriable
    assert failure.kind == "refused"
    assert not (tmp_path / "b.pt").exists()
    assert recorder.account.used <= recorder.account.limit


def test_room_made_by_removing_a_dump_is_used(tmp_path, make_recorder):
    recorder = make_recorder(limit=ROOM_FOR_ONE)
    for name in ("a", "b", "c"):
        hand_over(recorder, recorder.begin(request(name)), rows(10), 0, 10)
        while recorder.counts.published == 0 or not (tmp_path / f"{name}.pt").exists():
            time.sleep(0.001)
        (tmp_path / f"{name}.pt").unlink()
    recorder.close()
    assert recorder.counts.published == 3


def test_with_wait_the_engine_pauses_until_there_is_room(tmp_path, make_recorder):
    recorder = make_recorder(limit=ROOM_FOR_ONE, on_full="wait", wait_seconds=60)
    hand_over(recorder, recorder.begin(request("a")), rows(10), 0, 10)

    def make_room():
        while not (tmp_path / "a.pt").exists():
            time.sleep(0.001)
        (tmp_path / "a.pt").unlink()

    remover = threading.Thread(target=make_room)
    remover.start()
    capture = recorder.begin(request("b"))
    remover.join()
    assert capture.open
    hand_over(recorder, capture, rows(10), 0, 10)
    recorder.close()
    assert (tmp_path / "b.pt").exists()


def test_with_wait_the_pause_ends_in_a_refusal(tmp_path, make_recorder):
    recorder = make_recorder(limit=ROOM_FOR_ONE, on_full="wait", wait_seconds=0.1)
    hand_over(recorder, recorder.begin(request("a")), rows(10), 0, 10)
    assert not recorder.begin(request("b")).open
    recorder.close()
    assert read_failure(failure_path(tmp_path, "b")).retriable


def test_with_wait_all_requests_of_a_forward_wait_once_and_not_one_after_the_other(tmp_path, make_recorder):
    """Each for itself, they would wait until SGLang's watchdog ends the server."""
    recorder = make_recorder(limit=ROOM_FOR_ONE, on_full="wait", wait_seconds=0.5)
    hand_over(recorder, recorder.begin(request("a")), rows(10), 0, 10)
    for _ in range(2):
        recorder.begin_forward()
        started = time.monotonic()
        assert not recorder.begin(request("b")).open
        waited = time.monotonic() - started
        others = [recorder.begin(request(f"c{number}")) for number in range(100)]
        assert not any(capture.open for capture in others)
        assert waited >= 0.5
        assert time.monotonic() - started < 50  # 100 times half a second, were each to wait


def test_nobody_waits_for_room_that_only_the_engines_going_on_can_make(tmp_path, make_recorder):
    recorder = make_recorder(limit=ROOM_FOR_ONE, on_full="wait", wait_seconds=3600)
    under_way = recorder.begin(request("a"))
    assert not recorder.begin(request("b")).open
    hand_over(recorder, under_way, rows(10), 0, 10)
    recorder.close()
    assert read_failure(failure_path(tmp_path, "b")).retriable
    assert (tmp_path / "a.pt").exists()


def test_a_capture_larger_than_the_quota_will_never_fit(tmp_path, make_recorder):
    recorder = make_recorder(limit=1000)
    assert not recorder.begin(request()).open
    recorder.close()
    failure = read_failure(failure_path(tmp_path, "a"))
    assert "larger than the spool" in failure.reason
    assert not failure.retriable


def test_a_file_system_without_room_is_a_refusal_to_try_again(tmp_path, make_recorder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    recorder = make_recorder()
    monkeypatch.setattr("os.posix_fallocate", full)
    capture = recorder.begin(request())
    hand_over(recorder, capture, rows(10), 0, 10)
    recorder.close()
    failure = read_failure(failure_path(tmp_path, "a"))
    assert failure.reason.startswith(SPOOL_FULL)
    assert failure.retriable
    assert recorder.account.used == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.failed.json"]


def test_a_request_that_the_engine_let_go_fails_with_what_is_missing(tmp_path, make_recorder, monkeypatch):
    monkeypatch.setattr(writer_thread, "HOUSEKEEPING_SECONDS", 0.01)
    reasons = []
    recorder = make_recorder()
    capture = recorder.begin(request(gone=lambda: reasons[0] if reasons else None))
    hand_over(recorder, capture, rows(10), 0, 4)
    reasons.append("aborted")
    while capture.open:
        time.sleep(0.001)
    recorder.close()
    assert "aborted; rows [(4, 10)] of 10 are missing" in read_failure(failure_path(tmp_path, "a")).reason
    assert [path.name for path in tmp_path.iterdir()] == ["a.failed.json"]
    assert recorder.account.used == 0


def test_an_id_published_before_is_a_duplicate(tmp_path, make_recorder):
    recorder, first = make_recorder(), rows(10, seed=1)
    hand_over(recorder, recorder.begin(request()), first, 0, 10)
    while recorder.counts.published == 0:
        time.sleep(0.001)
    hand_over(recorder, recorder.begin(request()), rows(10, seed=2), 0, 10)
    recorder.close()
    assert (recorder.counts.published, recorder.counts.duplicates) == (1, 1)
    assert_dump_holds(tmp_path / "a.pt", first)


def test_of_one_id_filled_twice_at_once_the_first_complete_one_stands(tmp_path, make_recorder):
    recorder, content = make_recorder(), {n: rows(10, seed=n) for n in (1, 2, 3)}
    one, two, aborted = (recorder.begin(request()) for _ in range(3))
    hand_over(recorder, one, content[1], 0, 5)
    hand_over(recorder, two, content[2], 0, 10)
    hand_over(recorder, one, content[1], 5, 10)
    recorder.fail(aborted, "aborted")
    recorder.close()
    assert_dump_holds(tmp_path / "a.pt", content[2])
    assert (recorder.counts.published, recorder.counts.duplicates, recorder.counts.failed) == (1, 1, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt"}


def test_a_reason_is_kept_short_whatever_a_client_sent(tmp_path, make_recorder):
    recorder = make_recorder()
    recorder.refuse("a", "request", "found " + "x" * 1_000_000)
    recorder.close()
    assert read_failure(failure_path(tmp_path, "a")).reason.startswith("found xxx")
    assert failure_path(tmp_path, "a").stat().st_size < 2000
    assert len(recorder.last_error) < 2000


def test_failures_that_a_full_file_system_has_no_room_for_are_written_later(tmp_path, make_recorder, monkeypatch):
    monkeypatch.setattr(writer_thread, "HOUSEKEEPING_SECONDS", 0.01)
    recorder, write, tried = make_recorder(), failure_log.write_failure, []

    def full(_, failure):
        tried.append(failure.capture_id)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(failure_log, "write_failure", full)
    for name in ("a", "b", "c"):
        recorder.refuse(name, "request", "a reason")
    hand_over(recorder, recorder.begin(request("b")), rows(10), 0, 10)
    while tried.count("a") < 3:
        time.sleep(0.001)
    monkeypatch.setattr(failure_log, "write_failure", write)
    while not failure_path(tmp_path, "c").exists():
        time.sleep(0.001)
    recorder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.failed.json", "b.pt", "c.failed.json"]


def test_a_retry_that_succeeds_takes_the_old_failure_away(tmp_path, make_recorder):
    recorder = make_recorder()
    recorder.refuse("a", "request-a", "spool full", retriable=True)
    hand_over(recorder, recorder.begin(request()), rows(10), 0, 10)
    recorder.close()
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt"}


@pytest.mark.parametrize(
    "tensor", [torch.zeros(10, 9, dtype=torch.bfloat16), torch.zeros(10, 8), torch.zeros(11, 8, dtype=torch.bfloat16)]
)
def test_rows_that_do_not_fit_fail_the_capture_and_nothing_else(tmp_path, make_recorder, tensor):
    recorder, content = make_recorder(), rows(10)
    bad, good = recorder.begin(request("bad")), recorder.begin(request("good"))
    recorder.copy(bad, 3, tensor, 0)
    hand_over(recorder, good, content, 0, 10)
    recorder.close()
    assert "could not be copied" in read_failure(failure_path(tmp_path, "bad")).reason
    assert_dump_holds(tmp_path / "good.pt", content)


def test_a_spool_that_cannot_be_written_fails_captures_and_the_writer_lives(tmp_path, make_recorder, monkeypatch):
    recorder = make_recorder()

    def read_only(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("os.open", read_only)
        patched.setattr("os.link", read_only)
        capture = recorder.begin(request("a"))
        recorder.copy(capture, 3, rows(10)[3], 0)
        assert not capture.open
        while "Permission" not in recorder.last_error:
            time.sleep(0.001)
    hand_over(recorder, recorder.begin(request("b")), rows(10), 0, 10)
    recorder.close()
    assert (tmp_path / "b.pt").exists()


def test_a_flood_of_refusals_does_not_fill_the_memory(tmp_path, make_recorder, monkeypatch):
    monkeypatch.setattr(failure_log, "MOST_FAILURES", 5)
    recorder = make_recorder()
    for number in range(20):
        recorder.refuse(f"bad{number}", "r", "no")
    recorder.close()
    assert len(list(tmp_path.iterdir())) == 5
    assert recorder.counts.refused == 20


def test_coverage_tells_what_is_missing():
    coverage = Coverage()
    assert coverage.missing(10) == [(0, 10)]
    coverage.add(2, 4)
    coverage.add(6, 8)
    assert coverage.missing(10) == [(0, 2), (4, 6), (8, 10)]
    assert not coverage.reaches(10)
    coverage.add(0, 6)
    coverage.add(8, 10)
    assert coverage.missing(10) == []
    assert coverage.reaches(10)


def test_a_recorder_that_gave_up_begins_nothing_and_says_why(tmp_path, make_recorder):
    recorder = make_recorder()
    under_way = recorder.begin(request("a"))
    recorder.give_up("the spool was moved away")
    assert not under_way.open
    assert not recorder.begin(request("b")).open
    recorder.close()
    reasons = {name: read_failure(failure_path(tmp_path, name)).reason for name in "ab"}
    assert reasons == dict.fromkeys("ab", "the spool was moved away")
