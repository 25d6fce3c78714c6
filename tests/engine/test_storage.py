"""Storage that runs out, is taken away or is left half done: the server lives, captures are refused or whole."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.captures import CapturingServer, assert_rows_agree, spool_directory
from sglang_capture.dump import load_dump
from sglang_capture.spool import SPOOL_FULL, Counts, dumps, failures, read_failure, read_status

pytestmark = pytest.mark.engine

MIB = 1 << 20
SIX_LAYERS = {"layers": "0,1,2,3,4,5", "last_hidden": "both"}
"""4,104 bytes a token in float32, so that small prompts fill a small spool."""


@pytest.fixture(scope="module")
def small_file_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tmpfs of 64 MB."""
    mount = tmp_path_factory.mktemp("tmpfs")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount)], check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.fixture(scope="module")
def small_server(tiny6_model_dir: Path, small_file_system: Path) -> Iterator[CapturingServer]:
    """Writes into the small tmpfs, and may take all of it."""
    settings = {**SIX_LAYERS, "quota": "100%"}
    with CapturingServer(tiny6_model_dir, small_file_system / "spool", "--dtype", "float32", **settings) as running:
        yield running


def capture_many(server: CapturingServer, names: list[str], prompt: list[int], at_once: int = 8) -> None:
    with ThreadPoolExecutor(at_once) as pool:
        for answer in pool.map(lambda name: server.capture(prompt, {"capture": name}), names):
            assert answer["meta_info"]["completion_tokens"] == 1


def settled(server: CapturingServer, names: list[str]) -> tuple[list[str], list[str]]:
    """The names with a dump and those with a failure, when each has one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        whole = [name for name in names if (server.spool / f"{name}.pt").exists()]
        refused = [name for name in names if (server.spool / f"{name}.failed.json").exists()]
        if len(whole) + len(refused) >= len(names):
            return whole, refused
        time.sleep(0.05)
    raise AssertionError(f"of {len(names)} captures {len(whole)} came and {len(refused)} failed")


def test_a_file_system_that_others_fill_at_any_moment(small_server, small_file_system, oracle6, draw, new_id):
    prompt, names, stop = draw(500), [new_id() for _ in range(60)], threading.Event()

    def fill_and_free() -> None:
        chance, filler = random.Random(7), small_file_system / "filler"
        while not stop.is_set():
            size = shutil.disk_usage(small_file_system).free - chance.choice([0, 4096, MIB, 3 * MIB])
            # Where the server was quicker, the next round fills it.
            with filler.open("wb") as file, contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(1, size))
            time.sleep(chance.random() * 0.05)
            filler.unlink()
            time.sleep(chance.random() * 0.05)

    other = threading.Thread(target=fill_and_free)
    other.start()
    try:
        capture_many(small_server, names, prompt)
    finally:
        stop.set()
        other.join()
    small_server.assert_serving()
    whole = [name for name in names if (small_server.spool / f"{name}.pt").exists()]
    for name in whole:
        assert_rows_agree(load_dump(small_server.spool / f"{name}.pt"), oracle6, prompt)
    for path in failures(small_server.spool):
        failure = read_failure(path)
        assert failure is None or failure.reason.startswith(SPOOL_FULL)
    assert small_server.alive
    small_server.clear_spool()
    name = new_id()
    small_server.capture(prompt, {"capture": name})
    assert_rows_agree(small_server.dump(name), oracle6, prompt)


def test_a_file_system_made_read_only_while_serving(small_server, small_file_system, oracle6, draw, new_id):
    name, prompt = new_id(), draw(50)
    small_server.clear_spool()
    small_server.counts()  # later than that: the server has let go of the dumps that are gone
    subprocess.run(["mount", "-o", "remount,ro", str(small_file_system)], check=True)
    try:
        small_server.capture(prompt, {"capture": new_id()})
        small_server.assert_serving()
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_file_system)], check=True)
    small_server.capture(prompt, {"capture": name})
    assert_rows_agree(small_server.dump(name), oracle6, prompt)


def test_a_full_spool_refuses_and_the_server_serves(small_server, draw, new_id):
    small_server.clear_spool()
    names = [new_id() for _ in range(40)]
    capture_many(small_server, names, draw(700))
    whole, refused = settled(small_server, names)
    assert whole
    assert refused
    assert all(small_server.failure(name).retriable for name in refused)
    small_server.clear_spool()
    again = refused[:5]
    capture_many(small_server, again, draw(700))
    assert settled(small_server, again) == (again, [])


def test_a_quota_is_kept_and_with_wait_the_engine_waits_for_room(tiny6_model_dir, oracle6, draw, new_id):
    quota, prompt = 8 * MIB, draw(400)
    with (
        spool_directory() as spool,
        CapturingServer(
            tiny6_model_dir, spool, "--dtype", "float32", **SIX_LAYERS, quota="8MiB", on_full="wait", wait_seconds="10"
        ) as server,
    ):
        names, packed, largest, stop = [new_id() for _ in range(30)], {}, [0], threading.Event()

        def pack_away() -> None:
            """What the side service does: copies dumps, then removes them."""
            while not stop.is_set():
                held = 0
                for path in spool.glob(".part-*"):
                    held += _size(path)
                for path in list(dumps(spool)):
                    held += _size(path)
                    packed[path.name] = load_dump(path).hidden_states.clone()
                    path.unlink()
                largest[0] = max(largest[0], held)
                time.sleep(0.01)

        packer = threading.Thread(target=pack_away)
        packer.start()
        try:
            capture_many(server, names, prompt, at_once=4)  # what one batch holds must fit into the quota
            deadline = time.monotonic() + 60
            while len(packed) < 30 and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            stop.set()
            packer.join()
        assert len(packed) == 30
        assert 5 * quota < 30 * 400 * 4104
        assert largest[0] <= quota
        assert server.counts().refused == 0
        run = oracle6.run(prompt)
        for states in packed.values():
            assert (states[:, 5] - run.hidden_states[5]).norm() / run.hidden_states[5].norm() < 1e-5

        # Nobody packs any more: the pause ends, the request is served, the capture is refused.
        while server.counts().refused == 0:
            capture_many(server, [new_id() for _ in range(6)], prompt)
        server.assert_serving()


def test_a_spool_that_is_made_anew_ends_the_capturing_and_the_status_says_so(tiny6_model_dir, draw, new_id):
    with (
        spool_directory() as spool,
        CapturingServer(tiny6_model_dir, spool, "--dtype", "float32", **SIX_LAYERS) as server,
    ):
        before, after = new_id(), new_id()
        server.capture(draw(20), {"capture": before})
        server.dump(before)
        spool.rename(spool.with_name("away"))
        spool.mkdir(mode=0o700)
        deadline = time.monotonic() + 30
        while (status := read_status(spool)) is None or status.state != "refused":
            assert time.monotonic() < deadline, "the status never said it"
            time.sleep(0.1)
        assert "restart the server" in status.problem
        server.capture(draw(20), {"capture": after})
        assert server.failure(after).reason == status.problem
        server.assert_serving()


def test_killed_at_any_moment_nothing_half_done_is_seen_and_nothing_whole_is_lost(
    tiny6_model_dir, oracle6, draw, new_id
):
    prompt = draw(300)
    with spool_directory() as spool:
        with CapturingServer(tiny6_model_dir, spool, "--dtype", "float32", layers="0,3,5") as first:
            names = [new_id() for _ in range(200)]

            def send(name: str) -> None:
                try:
                    first.capture(prompt, {"capture": name})
                except Exception:  # the server dies under it
                    return

            with ThreadPoolExecutor(8) as pool:
                sending = [pool.submit(send, name) for name in names]
                while len(list(dumps(spool))) < 10:
                    time.sleep(0.002)
                time.sleep(random.random() * 0.3)
                first.kill()
                for request in sending:
                    request.cancel()
        published = list(dumps(spool))
        assert len(published) >= 10
        for path in published:
            assert_rows_agree(load_dump(path), oracle6, prompt)
        before = {path.name: path.read_bytes() for path in published}
        (spool / ".part-left-by-the-dead").write_bytes(b"half")
        with CapturingServer(tiny6_model_dir, spool, "--dtype", "float32", layers="0,3,5") as second:
            assert not list(spool.glob(".part-*"))
            assert {path.name: path.read_bytes() for path in dumps(spool)} == before
            assert second.counts() == Counts(forwards=second.counts().forwards)
            name = new_id()
            second.capture(prompt, {"capture": name})
            assert_rows_agree(second.dump(name), oracle6, prompt)
            _assert_a_second_server_is_refused(tiny6_model_dir, spool)


def _assert_a_second_server_is_refused(model: Path, spool: Path) -> None:
    with pytest.raises(RuntimeError, match="another server"), CapturingServer(model, spool, layers="0,3,5"):
        pass


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
