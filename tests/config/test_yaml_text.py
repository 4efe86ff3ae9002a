from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import ConfigError
from knnper.experiment import dump_yaml, parse_yaml

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")))
    | st.sampled_from(["1e-3", "1e3", "no", "010", "1:30", "2020-01-01", "~", ".5", ""])
)
VALUES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "no", "1e-3"]), below, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("-.5e-2", -0.005),
        ("1.", 1.0),
        (".inf", float("inf")),
        ("1_000", 1000),
        ("-7", -7),
        ("no", "no"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("'1e-3'", "1e-3"),
        ("+", "+"),
        ("True", True),
        ("", None),
        ("~", None),
        ("[0, 0.5]", [0, 0.5]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_values(text: str, value: object) -> None:
    parsed = parse_yaml(text, "file")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"line 3, column 1: .*the key 'a' occurs twice"),
        ("x: {a: 1, a: 2}", r"line 1, column 11: .*the key 'a' occurs twice"),
        ("a: b: c", r"line 1, column 5: invalid YAML: mapping values are not allowed"),
        ("? [a]\n: 1", r"a key must be plain text"),
        ("a: !!binary aGk=", r"holds a value that is not text, a number"),
        ("a: &x [*x]", r"holds a value that is not text, a number"),
        ("a: !!python/object:os.system {}", r"could not determine a constructor"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "file")


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_dump_and_parse_are_inverse(value: Any) -> None:
    assert parse_yaml(dump_yaml(value), "file") == value
