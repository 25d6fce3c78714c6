import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_capture.layers import (
    LayerError,
    canonical_layers,
    check_layers,
    default_layers,
    eagle3_layers,
    from_output_of,
    output_of,
    parse_layers,
)


def test_the_default_of_61_layers_is_the_documented_one():
    assert default_layers(61) == (3, 31, 59)
    assert output_of(default_layers(61)) == (2, 30, 58)
    assert eagle3_layers(61) == (2, 30, 58)


@given(st.integers(3, 200))
def test_defaults_are_three_different_indices_that_the_model_has(num_layers):
    layers = default_layers(num_layers)
    assert len(set(layers)) == 3
    assert list(layers) == sorted(layers)
    check_layers(layers, num_layers)


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(3, (0, 1, 2)), (4, (1, 2, 3)), (5, (2, 3, 4)), (6, (3, 4, 5)), (7, (3, 4, 5)), (8, (3, 5, 6))],
)
def test_the_default_of_a_shallow_model(num_layers, layers):
    assert default_layers(num_layers) == layers


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_model_too_shallow_for_a_default_says_what_to_set(num_layers):
    with pytest.raises(LayerError, match="SGLANG_CAPTURE_LAYERS"):
        default_layers(num_layers)


def test_layers_are_read_in_any_order():
    assert parse_layers(" 59, 3,31 ") == (3, 31, 59)


@pytest.mark.parametrize("text", ["", ",", "3,x", "3;31", "-1", "3,3", "1.5"])
def test_unreadable_layers_are_refused(text):
    with pytest.raises(LayerError):
        parse_layers(text)


@pytest.mark.parametrize("entry", [True, 1.0, "3", None, [3]])
def test_only_whole_numbers_are_indices(entry):
    with pytest.raises(LayerError, match="whole numbers"):
        canonical_layers([entry])


def test_the_index_of_the_layer_count_hints_at_the_last_hidden_state():
    with pytest.raises(LayerError, match="last_hidden"):
        check_layers([61], 61)


def test_an_index_behind_the_model_names_the_range():
    with pytest.raises(LayerError, match="0 to 60"):
        check_layers([3, 70], 61)


def test_the_embeddings_are_no_layers_output():
    assert output_of([0, 1]) == (None, 0)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_translating_there_and_back_changes_nothing(outputs):
    assert set(output_of(from_output_of(outputs))) == outputs
