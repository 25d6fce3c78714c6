import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_capture.mark import Mark, MarkError, build_mark, is_capture_id, parse_mark, refused_id, safe_id

CAPTURE_IDS = st.from_regex(r"\A[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z")
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("custom_params", [None, {}, {"capture": None}, {"capture": False}, {"other": 1}, "capture", 7])
def test_a_request_without_a_mark_is_not_marked(custom_params):
    assert parse_mark(custom_params) is None


def test_true_asks_for_everything_as_the_server_is_set():
    assert parse_mark({"capture": True}) == Mark(None, None, None)


def test_a_mark_may_name_its_own_layers_and_last_state():
    mark = parse_mark({"capture": "a.b-c_1", "capture_layers": [59, 3], "capture_last_hidden": "both"})
    assert mark == Mark("a.b-c_1", (3, 59), "both")


@pytest.mark.parametrize(
    "custom_params",
    [
        {"capture": 1},
        {"capture": ""},
        {"capture": "../x"},
        {"capture": ".hidden"},
        {"capture": "a" * 129},
        {"capture": "naïve"},
        {"capture": "a\n"},
        {"capture": "a", "capture_layers": "3,31"},
        {"capture": "a", "capture_layers": []},
        {"capture": "a", "capture_layers": [3, 3]},
        {"capture": "a", "capture_layers": [-1]},
        {"capture": "a", "capture_layers": [True]},
        {"capture": "a", "capture_last_hidden": "last"},
        {"capture": "a", "capture_last_hidden": True},
        {"capture": "a", "capture_layer": [3]},
        {"capture": True, "capture_": None},
    ],
)
def test_a_malformed_mark_is_refused_under_a_name_that_is_no_path(custom_params):
    with pytest.raises(MarkError):
        parse_mark(custom_params)
    assert is_capture_id(refused_id(custom_params, "../../etc/passwd"))


def test_a_misspelt_key_is_named_beside_those_there_are():
    with pytest.raises(MarkError, match=r"the keys capture, capture_layers, .*; found 'capture_layer'"):
        parse_mark({"capture": "a", "capture_layer": [3]})


def test_keys_of_others_are_left_alone():
    assert parse_mark({"capture": True, "top_logprobs": 3, "recapture": 1}) == Mark()
    assert parse_mark({"captured_by": "somebody else"}) is None


def test_the_secret_is_wanted_where_one_is_set():
    assert parse_mark({"capture": True, "capture_token": "s3cret"}, token="s3cret") == Mark()
    for custom_params in (
        {"capture": True},
        {"capture": True, "capture_token": "other"},
        {"capture": True, "capture_token": 3},
    ):
        with pytest.raises(MarkError, match="capture_token") as refusal:
            parse_mark(custom_params, token="s3cret")
        assert "s3cret" not in str(refusal.value)


def test_a_secret_that_is_not_wanted_is_ignored():
    assert parse_mark({"capture": True, "capture_token": "x"}) == Mark()


@given(
    st.none() | CAPTURE_IDS,
    st.none() | st.sets(st.integers(0, 100), min_size=1).map(sorted),
    st.sampled_from([None, "none", "post", "pre", "both"]),
    st.none() | st.text(),
)
def test_what_is_built_is_what_is_read(capture_id, layers, last_hidden, token):
    built = build_mark(capture_id, layers=layers, last_hidden=last_hidden, token=token)
    expected = Mark(capture_id, None if layers is None else tuple(layers), last_hidden)
    assert parse_mark(built, token=token) == expected


def test_a_mark_that_cannot_be_is_not_built():
    with pytest.raises(MarkError, match="capture id"):
        build_mark("../x")


@given(ANYTHING)
def test_no_id_becomes_a_path(anything):
    name = safe_id(anything)
    assert is_capture_id(name)
    assert "/" not in name
    assert not name.startswith(".")


@given(
    st.dictionaries(st.sampled_from(["capture", "capture_layers", "capture_last_hidden", "capture_token"]), ANYTHING)
)
def test_whatever_a_client_sends_is_a_mark_or_a_clear_refusal(custom_params):
    try:
        mark = parse_mark(custom_params, token=None)
    except MarkError as error:
        assert len(str(error)) < 400
    else:
        assert mark is None or isinstance(mark, Mark)
