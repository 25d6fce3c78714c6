"""Several pipeline stages fill one dump: the first answers for it, the later ones hand over their rows."""

import errno
import os
import threading
import time

import pytest
import torch
from factories import make_spec
from recording import assert_dump_holds, hand_over, request, rows, wait_for

from sglang_capture import recorder as recorder_module
from sglang_capture.follower import Follower
from sglang_capture.quota import Account, in_pages
from sglang_capture.recorder import Recorder
from sglang_capture.spool import SPOOL_FULL, failure_path, read_failure

SPEC = make_spec(last_hidden="post")
FIRST, SECOND = [3, 31], [59, "last_hidden_state"]
"""What each of two stages holds."""


@pytest.fixture
def stages(tmp_path):
    first = Recorder(tmp_path, Account(1 << 30), rank="dp0", device="cpu", stages=2)
    second = Follower(tmp_path, group="dp0", stage=1, device="cpu")
    yield first, second
    first.close()
    second.close()


def part_of(content, keys):
    return {key: content[key] for key in keys}


def test_two_stages_fill_one_dump_chunk_by_chunk(tmp_path, stages):
    first, second = stages
    content = rows(10, SPEC)
    one, two = first.begin(request(spec=SPEC)), second.begin(request(spec=SPEC))
    for start, stop in ((0, 4), (4, 10)):
        hand_over(first, one, part_of(content, FIRST), start, stop)
        assert not (tmp_path / "a.pt").exists()
        hand_over(second, two, part_of(content, SECOND), start, stop)
    wait_for((tmp_path / "a.pt").exists)
    wait_for(lambda: len(list(tmp_path.iterdir())) == 1)
    assert_dump_holds(tmp_path / "a.pt", content)
    assert first.counts.published == 1
    assert first.in_flight == second.in_flight == 0


def test_the_second_stage_may_have_all_the_rows(tmp_path, stages):
    """The first has none to wait with: it is done with its part before the dump is laid out."""
    first, second = stages
    held = threading.Event()
    first._thread.submit(held.wait)
    content = {key: tensor for key, tensor in rows(10, SPEC).items() if key in SECOND}
    spec = SPEC.model_copy(update={"layers": (59,)})
    one, two = first.begin(request(spec=spec)), second.begin(request(spec=spec))
    first.commit(one, 0, 10)
    held.set()
    hand_over(second, two, content, 0, 10)
    wait_for((tmp_path / "a.pt").exists)
    assert_dump_holds(tmp_path / "a.pt", content)
    assert (first.counts.published, first.counts.failed) == (1, 0)


def test_a_layout_that_fails_behind_the_first_stages_part_is_told_with_its_reason(tmp_path, stages, monkeypatch):
    first, second = stages
    held = threading.Event()
    first._thread.submit(held.wait)
    spec = SPEC.model_copy(update={"layers": (59,)})
    one, two = first.begin(request(spec=spec)), second.begin(request(spec=spec))
    first.commit(one, 0, 10)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    held.set()
    hand_over(second, two, {key: rows(10, SPEC)[key] for key in SECOND}, 0, 10)
    wait_for(failure_path(tmp_path, "a").exists)
    failure = read_failure(failure_path(tmp_path, "a"))
    assert failure.reason.startswith(SPOOL_FULL) and failure.retriable
    wait_for(lambda: first.in_flight == second.in_flight == first.account.used == 0)
    assert (first.counts.failed, first.counts.published) == (1, 0)


def test_the_second_stage_may_come_long_after_the_first(tmp_path, stages):
    first, second = stages
    contents = {f"c{n}": rows(10, SPEC, seed=n) for n in range(5)}
    ones = {name: first.begin(request(name, spec=SPEC)) for name in contents}
    for name, content in contents.items():
        hand_over(first, ones[name], part_of(content, FIRST), 0, 10)
    wait_for(lambda: first.in_flight == 5)
    for name, content in reversed(contents.items()):
        hand_over(second, second.begin(request(name, spec=SPEC)), part_of(content, SECOND), 0, 10)
    wait_for(lambda: first.counts.published == 5)
    for name, content in contents.items():
        assert_dump_holds(tmp_path / f"{name}.pt", content)


def test_a_stage_that_holds_nothing_of_what_is_asked_for_only_says_that_it_is_done(tmp_path, stages):
    first, second = stages
    spec = make_spec(layers=(3,), last_hidden="none")
    content = rows(10, spec)
    one, two = first.begin(request(spec=spec)), second.begin(request(spec=spec))
    hand_over(first, one, content, 0, 10)
    second.commit(two, 0, 10)
    wait_for((tmp_path / "a.pt").exists)
    assert_dump_holds(tmp_path / "a.pt", content)


def test_what_the_first_stage_refuses_the_second_leaves_alone(tmp_path):
    first = Recorder(tmp_path, Account(100), rank="dp0", device="cpu", stages=2)
    second = Follower(tmp_path, group="dp0", stage=1, device="cpu")
    assert not first.begin(request(spec=SPEC)).open
    two = second.begin(request(spec=SPEC))
    hand_over(second, two, part_of(rows(10, SPEC), SECOND), 0, 10)
    assert not two.open
    second.refuse("b", "request-b", "a reason")
    first.close()
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.failed.json"]


def test_a_failure_of_the_second_stage_ends_the_capture_with_its_reason(tmp_path, stages):
    first, second = stages
    one, two = first.begin(request(spec=SPEC)), second.begin(request(spec=SPEC))
    hand_over(first, one, part_of(rows(10, SPEC), FIRST), 0, 10)
    second.copy(two, 59, torch.zeros(10, 3), 0)
    wait_for(failure_path(tmp_path, "a").exists)
    assert "pipeline stage 1: its rows could not be copied" in read_failure(failure_path(tmp_path, "a")).reason
    wait_for(lambda: [path.name for path in tmp_path.iterdir()] == ["a.failed.json"])
    assert first.account.used == 0


def test_a_failure_of_the_first_stage_ends_the_second_too(tmp_path, stages):
    first, second = stages
    one, two = first.begin(request(spec=SPEC)), second.begin(request(spec=SPEC))
    hand_over(first, one, part_of(rows(10, SPEC), FIRST), 0, 4)
    hand_over(second, two, part_of(rows(10, SPEC), SECOND), 0, 4)
    first.fail(one, "aborted")
    second.fail(two, "aborted")
    wait_for(lambda: [path.name for path in tmp_path.iterdir()] == ["a.failed.json"])
    assert read_failure(failure_path(tmp_path, "a")).reason == "aborted"


def test_a_second_stage_does_not_wait_for_a_layout_that_was_given_up(tmp_path, stages, monkeypatch):
    first, second = stages
    layout, going_on = threading.Event(), threading.Event()

    def full(*_, **__):
        layout.set()
        going_on.wait()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recorder_module, "DumpFile", full)
    first.begin(request(spec=SPEC))
    assert layout.wait(30)
    threading.Timer(0.1, going_on.set).start()
    begun = time.monotonic()
    two = second.begin(request(spec=SPEC))
    hand_over(second, two, part_of(rows(10, SPEC), SECOND), 0, 10)
    assert time.monotonic() - begun < 10
    assert not two.open
    assert second.in_flight == 0
    wait_for(failure_path(tmp_path, "a").exists)
    assert read_failure(failure_path(tmp_path, "a")).reason.startswith(SPOOL_FULL)
    wait_for(lambda: [path.name for path in tmp_path.iterdir()] == ["a.failed.json"])


def test_without_room_for_the_board_nothing_is_left_and_nobody_waits(tmp_path, stages, monkeypatch):
    first, second = stages

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert not first.begin(request(spec=SPEC)).open
    assert not list(tmp_path.glob(".part-*"))
    two = second.begin(request(spec=SPEC))
    hand_over(second, two, part_of(rows(10, SPEC), SECOND), 0, 10)
    assert not two.open
    assert first.account.used == 0


def test_a_second_stage_that_never_comes_is_waited_for_and_then_named(tmp_path, stages, monkeypatch):
    monkeypatch.setattr(recorder_module, "HANDOVER_SECONDS", 0.05)
    first, _ = stages
    hand_over(first, first.begin(request(spec=SPEC)), part_of(rows(10, SPEC), FIRST), 0, 10)
    wait_for(failure_path(tmp_path, "a").exists)
    assert "did not hand over its rows" in read_failure(failure_path(tmp_path, "a")).reason


def test_an_attempt_that_was_given_up_does_not_disturb_the_next(tmp_path, stages):
    first, second = stages
    content = rows(10, SPEC)
    given_up, late = first.begin(request(spec=SPEC)), second.begin(request(spec=SPEC))
    first.fail(given_up, "aborted")
    wait_for(lambda: first.account.used == 0)
    one, two = first.begin(request(spec=SPEC)), second.begin(request(spec=SPEC))
    hand_over(second, late, part_of(content, SECOND), 0, 10)
    hand_over(first, one, part_of(content, FIRST), 0, 10)
    hand_over(second, two, part_of(content, SECOND), 0, 10)
    wait_for((tmp_path / "a.pt").exists)
    assert_dump_holds(tmp_path / "a.pt", content)


def test_attempts_that_follow_at_once_keep_apart(tmp_path, stages):
    """The writer's thread has not come to removing the first when the second begins."""
    first, second = stages
    content, busy = rows(10, SPEC), threading.Event()
    first._thread.submit(busy.wait)
    first.fail(first.begin(request(spec=SPEC)), "aborted")
    one, two = first.begin(request(spec=SPEC)), second.begin(request(spec=SPEC))
    threading.Timer(0.1, busy.set).start()
    hand_over(first, one, part_of(content, FIRST), 0, 10)
    hand_over(second, two, part_of(content, SECOND), 0, 10)
    wait_for((tmp_path / "a.pt").exists)
    assert_dump_holds(tmp_path / "a.pt", content)
    wait_for(lambda: [path.name for path in tmp_path.iterdir()] == ["a.pt"])
    assert first.account.used == in_pages((tmp_path / "a.pt").stat().st_size)


def test_stages_side_by_side_with_many_captures(tmp_path, stages):
    first, second = stages
    contents = {f"c{n}": rows(20 + n, SPEC, seed=n) for n in range(30)}
    ready = threading.Semaphore(0)

    def run_first():
        for name, content in contents.items():
            hand_over(first, first.begin(request(name, 20 + int(name[1:]), spec=SPEC)), part_of(content, FIRST), 0, 60)
            ready.release()

    thread = threading.Thread(target=run_first)
    thread.start()
    for name, content in contents.items():
        ready.acquire()
        hand_over(second, second.begin(request(name, 20 + int(name[1:]), spec=SPEC)), part_of(content, SECOND), 0, 60)
    thread.join()
    wait_for(lambda: first.counts.published == 30)
    for name, content in contents.items():
        assert_dump_holds(tmp_path / f"{name}.pt", content)
