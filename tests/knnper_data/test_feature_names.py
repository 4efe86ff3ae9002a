"""Features by their names: a federation's order, pandas' index, what float32 loses."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.data.arrays import NpzFileSettings
from knnper.data.examples import Dataset, InputSpec
from knnper.data.features import order_by_name, pandas_index
from knnper.data.own_data import OWN_DATA, load_own
from knnper.data.site_data import SiteData
from knnper.data.site_task import SiteTask, task_of
from knnper.data.tables import TableSettings
from knnper.errors import DataError, OwnCodeError
from knnper.own import Door
from knnper.settings import Choice, parse_settings
from tests.knnper_data.site.site_cases import opened, surveyed

arrow: Any = pytest.importorskip("pyarrow")
pandas: Any = pytest.importorskip("pandas")
parquet: Any = importlib.import_module("pyarrow.parquet")

COUNT = 20
KINDS = np.array(["ill", "well"])[np.arange(COUNT) % 2]
PULSE, WEIGHT = 60.0 + np.arange(COUNT) / 7, 1.5 * np.arange(COUNT)[::-1]
SPEC = InputSpec((1, 1, 2), 2, (0.0, 0.0), (1.0, 1.0), "float32")
TASK = SiteTask(SPEC, ("ill", "well"), ("pulse", "weight"))
UNNAMED = SiteTask(SPEC, ("ill", "well"))
ALL = {"fractions": {"validation": 0, "test": 0}}


def frame(**changes: Any) -> Any:
    return pandas.DataFrame(
        {"pulse": PULSE, "weight": WEIGHT, "kind": KINDS, **changes}
    )


def put(table: Any, path: Path, **settings: Any) -> str:
    if path.suffix == ".parquet":
        table.to_parquet(path, **settings)
    else:
        table.to_csv(path, **settings)
    return str(path)


def loaded(path: str, **settings: Any) -> Dataset:
    return TableSettings(train=path, label="kind", **settings).load()


def rows_of(data: SiteData) -> Any:
    """Return the features of the training split by example, (n, d), in file order."""
    inputs = data.train.examples.images.reshape(len(data.train), -1).numpy()
    return inputs[np.argsort(data.train.names)]


EXPECTED = np.stack([PULSE, WEIGHT], axis=1).astype(np.float32)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("columns", [["weight", "kind", "pulse"], ["note", "pulse "]])
def test_a_site_finds_features_by_name(
    tmp_path: Path, suffix: str, columns: list[str]
) -> None:
    table = frame(note="words")
    if "pulse " in columns:
        table = table.rename(columns={"pulse": "pulse\u00a0", "weight": " weight"})
        table = table[["note", " weight", "kind", "pulse\u00a0"]]
    else:
        table = table[columns]
    path = put(table, tmp_path / f"a{suffix}", index=False)
    data = opened("table", tmp_path, TASK, path=path, label="kind", **ALL)
    np.testing.assert_array_equal(rows_of(data), EXPECTED)


def test_a_list_of_features_that_contradicts_the_federations(tmp_path: Path) -> None:
    settings = {"label": "kind", "path": put(frame(), tmp_path / "a.csv", index=False)}
    message = r"has 'weight' at position 1, where .* at position 2; .*: pulse, weight"
    with pytest.raises(DataError, match=message):
        opened("table", tmp_path, TASK, features=["weight", "pulse"], **settings)
    # Other names than the federation's are taken by their position.
    table = frame().rename(columns={"pulse": "beats"})
    settings["path"] = put(table, tmp_path / "b.csv", index=False)
    chosen = {"features": ["beats", "weight"], **settings, **ALL}
    data = opened("table", tmp_path, TASK, **chosen)
    np.testing.assert_array_equal(rows_of(data), EXPECTED)
    with pytest.raises(DataError, match=r"has no column 'pulse'.*known: beats, kind"):
        opened("table", tmp_path, TASK, **settings)


def test_places_in_lists_are_found_at_a_site(tmp_path: Path) -> None:
    lists = arrow.array([[float(row), 1.5] for row in range(COUNT)])
    columns = {"vector": lists, "age": PULSE, "kind": KINDS}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    task = task_of(loaded(str(tmp_path / "a.parquet")))
    assert task.feature_names == ("vector[0]", "vector[1]", "age")
    columns = {"kind": KINDS, "age": PULSE, "vector": lists}
    parquet.write_table(arrow.table(columns), tmp_path / "b.parquet")
    expected = np.stack([np.arange(COUNT), np.full(COUNT, 1.5), PULSE], axis=1)
    settings = {"label": "kind", "path": "b.parquet", **ALL}
    data = opened("table", tmp_path, task, **settings)
    np.testing.assert_array_equal(rows_of(data), expected.astype(np.float32))
    names = (*task.feature_names[:2], "vector[2]")
    with pytest.raises(DataError, match=r"no feature 'vector\[2\]'; did you mean"):
        opened(
            "table", tmp_path, SiteTask(task.spec, TASK.class_names, names), **settings
        )


def save_npz(folder: Path, **arrays: Any) -> str:
    swapped = np.stack([WEIGHT, PULSE], axis=1)
    np.savez(folder / "a.npz", **{"x": swapped, "y": KINDS, **arrays})
    return str(folder / "a.npz")


def test_names_in_an_npz_file(tmp_path: Path) -> None:
    path = save_npz(tmp_path, feature_names=["weight", "pulse"])
    assert NpzFileSettings(path=path).load().feature_names == ("weight", "pulse")
    # From the cache, too.
    assert NpzFileSettings(path=path).load().feature_names == ("weight", "pulse")
    data = opened("npz", tmp_path, TASK, path=path, **ALL)
    np.testing.assert_array_equal(rows_of(data), EXPECTED)
    assert surveyed("npz", tmp_path, path=path).task.feature_names == (
        "weight",
        "pulse",
    )
    path = save_npz(tmp_path, feature_names=["weight", "beats"])
    with pytest.raises(
        DataError, match=r"no feature 'pulse', which the federation agr"
    ):
        opened("npz", tmp_path, TASK, path=path)
    for names in (["weight"], ["pulse", "pulse"]):
        path = save_npz(tmp_path, feature_names=names)
        with pytest.raises(DataError, match="expected one for each of the 2 values"):
            NpzFileSettings(path=path).load()


@pytest.mark.parametrize("is_named", [False, True])
def test_features_by_position_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_named: bool
) -> None:
    if is_named:
        path = put(frame(), tmp_path / "a.csv", index=False)
        data = opened("table", tmp_path, UNNAMED, path=path, label="kind", **ALL)
        message = "the federation has no names of features"
    else:
        data = opened("npz", tmp_path, TASK, path=save_npz(tmp_path), **ALL)
        message = "the data has no names of features"
    assert len(data.train) == COUNT
    (warning,) = caplog.messages
    assert message in warning
    assert warning.endswith("matched by position: pulse, weight")


CODE = """
import numpy as np
import pandas

def arrays(base=None, task=None):
    weight, pulse = 1.5 * np.arange(20)[::-1], 60 + np.arange(20) / 7
    table = pandas.DataFrame({"weight": weight, "pulse": pulse})
    return {"x": table, "y": np.array(["ill", "well"])[np.arange(20) % 2]}

def of_two(is_torn: bool = False):
    table = arrays()["x"].reset_index().rename(columns={"index": "Unnamed: 0"})
    other = table[["pulse", "Unnamed: 0", "weight"]]
    if is_torn:
        other = other.drop(columns="weight")
    labels = arrays()["y"]
    return {"x_train": table, "y_train": labels, "x_test": other, "y_test": labels}
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "own_tables.py").write_text(CODE)
    yield tmp_path
    sys.modules.pop("own_tables", None)
    sys.path[:] = [one for one in sys.path if one != str(tmp_path)]


def test_names_of_columns_that_own_code_returns(own_code: Path) -> None:
    data = opened("own_tables:arrays", own_code, TASK, **ALL)
    np.testing.assert_array_equal(rows_of(data), EXPECTED)


def test_splits_of_own_code_are_joined_by_name(
    own_code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Door(own_code).open("own_tables:of_two", OWN_DATA)
    settings = own.settings_type
    data = load_own(Choice("of_two", settings(), own.entry))
    assert data.feature_names == ("weight", "pulse")
    np.testing.assert_array_equal(data.train.images, data.test.images)
    assert "'Unnamed: 0' seem to be the index" in caplog.text
    torn = parse_settings(settings, {"is_torn": True}, "data", [])
    assert torn is not None
    with pytest.raises(OwnCodeError, match="columns, only some with 'weight'"):
        load_own(Choice("of_two", torn, own.entry))


def test_names_in_order() -> None:
    assert order_by_name(["b", "a", "c"], ("a", "b"), "here") == [1, 0]
    assert order_by_name(["a ", "e\u0301"], ("\u00e9", "a"), "here") == [1, 0]
    with pytest.raises(DataError, match="here has no feature 'd'"):
        order_by_name(["a"], ("d",), "here")


INDEXED = {
    "without a name": lambda table: table,
    "two levels": lambda table: table.set_index([table.index, table.index]),
    "with a name": lambda table: table.rename_axis("patient"),
    "of a file": lambda table: table.rename_axis("Unnamed: 0"),
}


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("index", list(INDEXED))
def test_the_index_of_pandas_is_no_feature(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, index: str
) -> None:
    table = INDEXED[index](frame().sort_values("kind"))
    path = put(table, tmp_path / f"a{suffix}")
    data = loaded(path)
    if (index, suffix) == ("with a name", ".csv"):
        # Its name does not tell, but its values do.
        assert data.feature_names == ("patient", "pulse", "weight")
        assert "patient number the rows" in caplog.text
        return
    assert data.feature_names == ("pulse", "weight")
    assert "seem to be the index of a pandas table" in caplog.text
    # By its name, it is one.
    names = [*parquet.read_schema(path).names] if suffix == ".parquet" else []
    for name in {*names} - {*data.feature_names, "kind"}:
        chosen = loaded(path, features=("pulse", name))
        assert chosen.feature_names == ("pulse", name)
    for task in (None, TASK):
        site = surveyed("table", tmp_path, task, path=path, label="kind", **ALL)
        assert site.task.feature_names == ("pulse", "weight")


def test_an_index_that_is_the_label_or_the_id(tmp_path: Path) -> None:
    path = put(frame().set_index("kind"), tmp_path / "a.parquet")
    assert loaded(path).feature_names == ("pulse", "weight")
    path = put(frame(), tmp_path / "b.parquet")
    assert loaded(path).feature_names == ("pulse", "weight")


@pytest.mark.parametrize("columns", [[], ["id", 3], [{"kind": "range"}], None])
def test_metadata_of_pandas(columns: Any) -> None:
    metadata = {b"pandas": json.dumps({"index_columns": columns}).encode()}
    expected = {"id"} if columns == ["id", 3] else set()
    assert pandas_index(metadata) == expected
    assert pandas_index(None) == pandas_index({b"pandas": b"{"}) == set()


@pytest.mark.parametrize(
    ("values", "is_named"),
    [
        (np.arange(COUNT) + 7, True),
        (np.random.default_rng(0).permutation(COUNT), True),
        (2 * np.arange(COUNT), False),
        (np.arange(COUNT) / 2, False),
        (np.arange(COUNT) // 2, False),
    ],
)
def test_columns_that_number_the_rows_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: Any, is_named: bool
) -> None:
    path = put(frame(visit=values), tmp_path / "a.csv", index=False)
    assert loaded(path).feature_names == ("pulse", "weight", "visit")
    np.savez(tmp_path / "a.npz", x=np.stack([PULSE, values], axis=1), y=KINDS)
    NpzFileSettings(path=str(tmp_path / "a.npz")).load()
    for name in ("visit", "feature 1"):
        assert (f"{name} number the rows" in caplog.text) == is_named
    caplog.clear()
    # A column that is listed is meant.
    loaded(path, features=("visit",))
    assert not caplog.messages


NOW = 1_700_000_000


@pytest.mark.parametrize("is_site", [False, True])
@pytest.mark.parametrize("suffix", [".npz", ".csv"])
@pytest.mark.parametrize("unit", [1, 1000])
def test_times_that_float32_holds_too_coarsely(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_site: bool,
    suffix: str,
    unit: int,
) -> None:
    # Twenty minutes of seconds, or milliseconds, since 1970: one float32 or a few.
    times = unit * NOW + 60 * np.arange(COUNT)
    np.savez(tmp_path / "a.npz", x=np.stack([np.arange(COUNT) * 3, times], 1), y=KINDS)
    path = put(frame(weight=times), tmp_path / "a.csv", index=False)
    if is_site:
        kind = {".npz": "npz", ".csv": "table"}[suffix]
        chosen = {"path": f"a{suffix}"} | ({"label": "kind"} if kind == "table" else {})
        opened(kind, tmp_path, TASK, **chosen)
    elif suffix == ".npz":
        NpzFileSettings(path=str(tmp_path / "a.npz")).load()
    else:
        loaded(path)
    (message,) = [text for text in caplog.messages if "float32 loses" in text]
    column = "weight" if is_site or suffix == ".csv" else "feature 1"
    assert f"values of {column} are large" in message
