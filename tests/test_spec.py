import pytest

from sglang_capture.spec import CaptureSpec, SpecError

FIELDS = {
    "layers": (3, 31, 59),
    "last_hidden": "post",
    "hidden_size": 7168,
    "num_layers": 61,
    "vocab_size": 163840,
    "dtype": "bfloat16",
    "architecture": "DeepseekV3ForCausalLM",
    "model_path": "/models/a",
    "weights_digest": "d1",
}


def spec(**changes):
    return CaptureSpec(**{**FIELDS, **changes})


def test_bytes_per_token_are_the_documented_ones():
    assert spec().bytes_per_token == 4 * 7168 * 2 + 8
    assert spec(last_hidden="none").bytes_per_token == 3 * 7168 * 2 + 8
    assert spec(last_hidden="both", dtype="float32").bytes_per_token == 5 * 7168 * 4 + 8


def test_a_spec_survives_its_json():
    assert CaptureSpec.from_json(spec().to_json()) == spec()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", (3, 31)),
        ("last_hidden", "pre"),
        ("hidden_size", 128),
        ("dtype", "float16"),
        ("weights_digest", "d2"),
        ("vocab_size", 5),
        ("num_layers", 62),
        ("architecture", "Other"),
    ],
)
def test_captures_that_differ_in_what_they_hold_do_not_mix(field, value):
    other = spec(**{field: value})
    assert other.digest != spec().digest
    assert any(line.startswith(f"{field}:") for line in spec().differences(other))


@pytest.mark.parametrize(
    ("field", "value"),
    [("sglang_version", "0.5.22"), ("ranks", {"tp": 8}), ("created", "now"), ("model_path", "/elsewhere/a")],
)
def test_where_a_capture_came_from_does_not_keep_it_apart(field, value):
    other = spec(**{field: value})
    assert other.digest == spec().digest
    assert spec().differences(other) == []


def test_without_a_weights_digest_the_path_tells_models_apart():
    one, other = spec(weights_digest=""), spec(weights_digest="", model_path="/models/b")
    assert one.digest != other.digest
    assert one.differences(other) == ["model_path: /models/a / /models/b"]


def test_equal_layers_given_in_another_order_are_equal():
    assert spec(layers=(59, 3, 31)).digest == spec().digest


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "JSON"),
        ("{}", "layers"),
        (spec().to_json().replace("bfloat16", "int8"), "dtype"),
        (spec().to_json().replace("[3,31,59]", "[3,31,61]"), "last_hidden"),
    ],
)
def test_an_unreadable_spec_names_what_is_wrong(text, names):
    with pytest.raises(SpecError, match=names):
        CaptureSpec.from_json(text)
