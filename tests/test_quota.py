import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_capture.quota import PAGE_BYTES, Account, QuotaError, cgroup_headroom, free_bytes, in_pages, parse_quota


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 << 30),
        ("64 gib", 64 << 30),
        ("64G", 64 << 30),
        ("500MB", 500_000_000),
        ("1.5k", 1536),
        ("1073741824", 1 << 30),
        ("12B", 12),
        ("50%", 500),
        ("100%", 1000),
    ],
)
def test_sizes_and_shares(text, size):
    assert parse_quota(text, free=1000) == size


@pytest.mark.parametrize("text", ["", "lots", "10 apples", "-5", "1,5G", "%", "101%", "0", "0%", "0.1B"])
def test_an_unusable_quota_says_what_one_looks_like(text):
    with pytest.raises(QuotaError):
        parse_quota(text, free=1000)


@given(st.integers(1, 1 << 60))
def test_plain_bytes_stay_what_they_are(size):
    assert parse_quota(str(size) + "B", free=1) == int(float(size))


def test_the_control_groups_limit_counts(tmp_path):
    assert cgroup_headroom(tmp_path, "") is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert cgroup_headroom(tmp_path, "") is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert cgroup_headroom(tmp_path, "") == 300
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    assert cgroup_headroom(tmp_path, "") == 350
    (tmp_path / "memory.current").write_text("2000\n")
    assert cgroup_headroom(tmp_path, "") == 0


def test_version_1_of_control_groups_is_read(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("700")
    assert cgroup_headroom(tmp_path, "") is None
    (tmp_path / "memory/memory.limit_in_bytes").write_text("1000")
    assert cgroup_headroom(tmp_path, "") == 300


def test_a_units_limit_and_that_of_its_slice_count(tmp_path):
    unit = tmp_path / "system.slice" / "sglang.service"
    unit.mkdir(parents=True)
    for group, limit, used in ((unit, "900", "100"), (unit.parent, "max", "0"), (tmp_path, "1000", "500")):
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text(used)
    assert cgroup_headroom(tmp_path, "/system.slice/sglang.service") == 500
    (unit / "memory.current").write_text("600")
    assert cgroup_headroom(tmp_path, "/system.slice/sglang.service") == 300


def test_free_bytes_are_never_more_than_the_file_system_has(tmp_path):
    import shutil

    assert 0 <= free_bytes(tmp_path) <= shutil.disk_usage(tmp_path).total


def test_an_account_notices_what_others_removed(tmp_path):
    account = Account(10 * PAGE_BYTES)
    part, final = tmp_path / ".part-1", tmp_path / "a.pt"
    assert account.reserve(part, 6 * PAGE_BYTES)
    final.touch()
    account.rename(part, final, 5 * PAGE_BYTES)
    assert (account.used, account.free) == (5 * PAGE_BYTES, 5 * PAGE_BYTES)
    assert not account.reserve(tmp_path / ".part-2", 6 * PAGE_BYTES)
    final.unlink()
    assert account.reserve(tmp_path / ".part-2", 6 * PAGE_BYTES)
    assert account.used == 6 * PAGE_BYTES


def test_a_part_is_not_forgotten_although_it_is_no_file_yet(tmp_path):
    account = Account(10 * PAGE_BYTES)
    assert account.reserve(tmp_path / ".part-1", PAGE_BYTES)
    account.look()
    assert account.used == PAGE_BYTES
    account.release(tmp_path / ".part-1")
    account.release(tmp_path / ".part-1")
    assert account.used == 0


def test_what_an_earlier_server_left_counts(tmp_path):
    (tmp_path / "old.pt").write_bytes(b"x" * (PAGE_BYTES + 1))
    account = Account(10 * PAGE_BYTES)
    account.adopt(tmp_path / "old.pt")
    account.adopt(tmp_path / "gone.pt")
    assert account.used == 2 * PAGE_BYTES


def test_a_file_counts_with_the_pages_it_takes(tmp_path):
    account = Account(3 * PAGE_BYTES + 1)
    held = [account.reserve(tmp_path / f".part-{number}", 1) for number in range(4)]
    assert held == [True, True, True, False]
    assert account.used == 3 * PAGE_BYTES
    assert in_pages(0) == 0
    assert in_pages(PAGE_BYTES) == PAGE_BYTES
