import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import ConfigError, Problem
from knnper.settings import Override, apply_overrides, parse_overrides
from knnper.yaml_text import dump_yaml, parse_yaml

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
        # Tags whose values PyYAML takes on trust.
        ("!!bool maybe", "holds a value that is not text, a number"),
        ("!!int ''", "holds a value that is not text, a number"),
        ("!!timestamp soon", "holds a value that is not text, a number"),
        (f"!!float 1{200 * ':1'}", "holds a value that is not text, a number"),
        (f"a: !!int 1{500 * ':1'}", r"column 4: .*more than 1000 characters"),
        (101 * "[" + 101 * "]", r"column 101: .*nested more than 100 levels deep"),
        (101 * "- " + "1", r"nested more than 100 levels deep"),
        (
            "\n".join(["- &0 x", *(f"- &{n} [*{n - 1}]" for n in range(1, 120))]),
            r"line 101, .*nested more than 100 levels deep",
        ),
        # Lines that stand for 10^7 values, and for 2 * 10^6 characters.
        (
            "\n".join(
                ["- &0 [1]", *(f"- &{n} [{10 * f'*{n - 1},'}]" for n in range(1, 8))]
            ),
            r"line 7, column 3: .*aliases expand this value to more than 1000\d{3} ",
        ),
        (f"- &0 {2000 * 'x'}\n" + 1000 * "- *0\n", r"line 1, .*aliases expand"),
        (
            "\n".join(
                ["a0: &0 {k: 1}"]
                + [
                    f"a{n}: &{n} {{{', '.join(f'k{i}: *{n - 1}' for i in range(10))}}}"
                    for n in range(1, 8)
                ]
            ),
            r"line 7, column 5: .*aliases expand",
        ),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "file")


def test_aliases_and_nesting_within_limits() -> None:
    text = f"a: &a [1, 2]\nb: [*a, *a]\nc: {99 * '['}{99 * ']'}"
    assert parse_yaml(text, "file")["b"] == [[1, 2], [1, 2]]
    # An alias may add up to a million characters.
    assert len(parse_yaml(f"- &a {1000 * 'x'}\n" + 990 * "- *a\n", "file")) == 991


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_dump_and_parse_are_inverse(value: Any) -> None:
    assert parse_yaml(dump_yaml(value), "file") == value


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("a=x=y", ("a",), "x=y"),
        ("a=", ("a",), None),
        (" a . b = 1", ("a", "b"), 1),
    ],
)
def test_parse(text: str, path: tuple[str, ...], value: object) -> None:
    problems: list[Problem] = []
    assert parse_overrides([text], problems) == (Override(path, value),)
    assert problems == []


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("training", "override", 'expected KEY=VALUE, .*found "training"'),
        ("=3", "override", "expected KEY=VALUE"),
        ("a..b=3", "override", "expected KEY=VALUE"),
        ("a.b=[1", "a.b", r'found "\[1", expected a YAML value: invalid YAML'),
    ],
)
def test_malformed(text: str, place: str, message: str) -> None:
    problems: list[Problem] = []
    good = parse_overrides([text, "a=1"], problems)
    assert good == (Override(("a",), 1),)
    assert [problem.place for problem in problems] == [place]
    assert re.search(message, problems[0].message)


def test_sections_are_created_and_the_last_wins() -> None:
    problems: list[Problem] = []
    document = {"a": {"b": 1}, "empty": None}
    given = ["a.c=2", "a.c=3", "new.deep.x=4", "empty.x=5"]
    result = apply_overrides(document, parse_overrides(given, problems), problems)
    new = {"new": {"deep": {"x": 4}}, "empty": {"x": 5}}
    assert result == {"a": {"b": 1, "c": 3}, **new}
    assert document == {"a": {"b": 1}, "empty": None}
    assert problems == []


def test_a_path_through_a_value() -> None:
    problems: list[Problem] = []
    overrides = [Override(("a", "b", "c"), 2), Override(("grid", "0"), 2)]
    document = {"a": {"b": 1}, "grid": [1]}
    assert apply_overrides(document, overrides, problems) == document
    assert [str(problem) for problem in problems] == [
        "a.b.c: a.b is 1 and holds no settings; set a.b as a whole",
        "grid.0: grid is [1] and holds no settings; set grid as a whole",
    ]
