import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.data.columns import ColumnSelection, TableFile
from knnper.data.examples import Dataset, LabelledArrays
from knnper.data.tables import TableSettings, read_table
from knnper.errors import DataError

arrow: Any = pytest.importorskip("pyarrow")

parquet: Any = importlib.import_module("pyarrow.parquet")

BEYOND = 2**53 + 1  # no float64 is this number


def read(path: Path, *numbers: str) -> TableFile:
    return read_table(path, ColumnSelection.of(["y"], numbers or None))


def csv_of(folder: Path, text: str) -> Path:
    return Path(put(folder, text, "a.csv"))


def parquet_of(folder: Path, **columns: Any) -> Path:
    path = folder / "a.parquet"
    parquet.write_table(arrow.table(columns), path)
    return path


def test_text_behind_the_part_that_types_are_guessed_from(tmp_path: Path) -> None:
    # The first empty one is missing, and not what is wrong.
    lines = [f"{row},1.25,{'f' * 20}" for row in range(60_000)]
    lines[59_000] = f",1.25,{'f' * 20}"
    path = csv_of(tmp_path, "\n".join(["a,b,y", *lines, "n.k.,1.25,f"]))
    assert path.stat().st_size > 1 << 20
    expected = r"found another value in the column 'a' \(.*n\.k\."
    with pytest.raises(DataError, match=expected):
        read(path)
    assert read(path, "b").numbers.shape == (60_001, 1)


def test_whole_numbers_that_no_float_is(tmp_path: Path) -> None:
    path = csv_of(tmp_path, f"a,y\n{BEYOND},f\n")
    assert read(path).numbers.tolist() == [[float(BEYOND)]]
    column = arrow.array([2**64 - 1], type=arrow.uint64())
    assert read(parquet_of(tmp_path, a=column, y=["f"])).numbers.tolist() == [[2.0**64]]


def test_a_column_has_one_meaning(tmp_path: Path) -> None:
    path = csv_of(tmp_path, "a,y\n1,2\n")
    for twice in "ay":
        with pytest.raises(DataError, match=f"'{twice}' more than once .*features"):
            read(path, "a", twice)


@pytest.mark.parametrize("value", ["1e300", "-1e39"])
def test_values_that_float32_cannot_hold(tmp_path: Path, value: str) -> None:
    path = csv_of(tmp_path, f"a,b,y\n1,1,f\n{value},3e38,g\n")
    with pytest.raises(DataError, match=r"too large for float32, in 1 .*\(a 1\)"):
        read(path)


@pytest.mark.parametrize("kind", [arrow.float32(), arrow.float64()])
def test_a_label_that_is_no_number_is_missing(tmp_path: Path, kind: Any) -> None:
    labels = arrow.array([0, 1, float("nan"), None], type=kind)
    table = read(parquet_of(tmp_path, a=[1, 2, 3, 4], y=labels))
    assert table.texts["y"] == ("0", "1", "", "")
    with pytest.raises(DataError, match=r"2 rows hold nothing .* is row 3, count"):
        table.filled_texts("y")
    for missing in ("nan", "NaN"):
        table = read(csv_of(tmp_path, f"a,y\n1,0\n2,{missing}\n3,Nan\n"))
        with pytest.raises(DataError, match=f"1 rows hold {missing} .* is row 2, cou"):
            table.filled_texts("y")


ROWS = """age,kind,dose,ward
10,b,1.0,w2
20,a,1.0,w1
30,b,1.0,w2
40,a,1.0,w1
"""


def put(folder: Path, text: str, name: str = "train.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def loaded(path: str, **settings: Any) -> Dataset:
    return TableSettings(train=path, label="kind", **settings).load()


def test_two_files(tmp_path: Path) -> None:
    test = put(tmp_path, "dose,kind,age,ward\n7,a,5,w3\n", "test.csv")
    data = loaded(put(tmp_path, ROWS), test=test, features=("age", "dose"))
    assert data.class_names == ("a", "b")
    assert data.feature_names == ("age", "dose")
    assert data.spec.image_shape == (1, 1, 2)
    assert data.spec.dtype == "float32"
    # (10 + 20 + 30 + 40) / 4, and a deviation of 1 for what never varies.
    assert data.spec.mean == (25.0, 1.0)
    assert data.spec.std == pytest.approx((125**0.5, 1.0))
    assert data.train.labels.tolist() == [1, 0, 1, 0]
    assert data.train.images.dtype == np.float32
    np.testing.assert_array_equal(data.train.images[2], [[[30, 1]]])
    # By the names of the training rows' columns, not by their places.
    np.testing.assert_array_equal(data.test.images, [[[[5, 7]]]])
    assert data.train.client_ids is None


def test_one_file_is_divided(tmp_path: Path) -> None:
    rows = "".join(f"{number},{number % 2}\n" for number in range(200))
    path = put(tmp_path, f"x,kind\n{rows}")
    data = loaded(path, test_fraction=0.25)
    assert 25 < len(data.test) < 75
    found = np.concatenate([data.train.images, data.test.images]).ravel()
    assert sorted(found.tolist()) == list(range(200))
    for part in (data.train, data.test):
        np.testing.assert_array_equal(part.images.ravel() % 2, part.labels)
    other = loaded(path, test_fraction=0.25, seed=1)
    assert data.test.images.tolist() != other.test.images.tolist()


def test_clients_are_numbered_in_the_order_of_their_names(tmp_path: Path) -> None:
    test = put(tmp_path, "dose,kind,age,ward\n7,a,5,w10\n", "test.csv")
    data = loaded(put(tmp_path, ROWS), test=test, client="ward")
    assert data.feature_names == ("age", "dose")
    np.testing.assert_array_equal(data.train.client_ids, [2, 0, 2, 0])
    np.testing.assert_array_equal(data.test.client_ids, [1])
    np.testing.assert_array_equal(data.test.images, [[[[5, 7]]]])


def test_every_client_is_divided(tmp_path: Path) -> None:
    names = [f"c{client}" for client in range(100) for _ in range(5)] + ["alone"]
    rows = "".join(f"{at},{at % 2},{name}\n" for at, name in enumerate(names))
    path = put(tmp_path, f"x,kind,who\n{rows}")
    data = loaded(path, client="who")
    assert clients_of(data.test) == list(range(1, 101))
    assert clients_of(data.train) == [0, *(at for at in range(1, 101) for _ in "1234")]
    found = np.concatenate([data.train.images, data.test.images]).ravel()
    assert sorted(found.tolist()) == list(range(501))
    other = loaded(path, client="who", seed=1)
    assert data.test.images.tolist() != other.test.images.tolist()


def clients_of(part: LabelledArrays) -> list[int]:
    assert part.client_ids is not None
    return sorted(part.client_ids.tolist())


def test_the_names_of_a_clients_rows_decide(tmp_path: Path) -> None:
    rows = [f"{at},{at % 2},a,day{at // 2}" for at in range(20)]
    settings = {"client": "who", "id": "day", "test_fraction": 0.3}
    tested = []
    for ordered in (rows, rows[::-1]):
        text = "\n".join(["x,kind,who,day", *ordered])
        data = loaded(put(tmp_path, text), **settings)
        tested.append(sorted(data.test.images.ravel().tolist()))
    assert tested[0] == tested[1]
    # Both rows of a day, three days of ten.
    days = [value // 2 for value in tested[0]]
    assert len(days) == 6
    assert days[::2] == days[1::2]


@pytest.mark.parametrize("settings", [{}, {"client": "ward"}])
def test_a_row_without_a_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = put(tmp_path, "age,kind,ward,name\n1,a,w,p1\n2,b,w,\n3,a,w,\n")
    with pytest.raises(DataError, match=r"2 rows hold nothing .*'name', .* is row 2"):
        loaded(path, id="name", features=("age",), **settings)


def test_what_float32_holds_too_coarsely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # An hour of seconds since 1970, and a year of them.
    now = 1_700_000_000
    rows = "".join(
        f"{now + at * 36},{now + at * 315_360},{at / 7},4e9,{at % 2}\n"
        for at in range(100)
    )
    loaded(put(tmp_path, f"hour,year,x,same,kind\n{rows}"))
    (message,) = caplog.messages
    assert "values of hour are large" in message
    assert "subtract an offset" in message


def test_what_cannot_be_learned_from(tmp_path: Path) -> None:
    path = put(tmp_path, ROWS)
    other = put(tmp_path, "age,kind,dose,ward\n1,c,2,w1\n", "test.csv")
    bare = put(tmp_path, "age,kind,dose,ward\n", "bare.csv")
    empty = put(tmp_path, "age,kind\n1,\n", "empty.csv")
    two = ("age", "dose")
    cases: list[tuple[str, dict[str, Any], str]] = [
        (path, {"test": other, "client": "ward"}, "no training example has: c"),
        (path, {"test_fraction": 0.0, "client": "ward"}, r"no test .*data\.test_fract"),
        (path, {"test": bare, "features": two}, r"bare\.csv: found no test rows;"),
        (bare, {"features": ("age",)}, r"bare\.csv: found no training rows; add"),
        (empty, {}, "1 rows hold nothing in the column 'kind'"),
        (path, {}, r"found the columns ward \(string\)"),
    ]
    for file, settings, message in cases:
        with pytest.raises(DataError, match=message):
            loaded(file, **settings)


def test_a_column_of_lists_is_many_features(tmp_path: Path) -> None:
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    for lists in (
        arrow.array(rows),
        arrow.array(rows, arrow.list_(arrow.float32(), 2)),
    ):
        path = parquet_of(tmp_path, age=[7, 8, 9], vector=lists, kind=["a", "b", "a"])
        data = loaded(str(path), test=str(path))
        assert data.feature_names == ("age", "vector[0]", "vector[1]")
        expected = [[7, 1, 2], [8, 3, 4], [9, 5, 6]]
        np.testing.assert_array_equal(data.test.images[:, 0, 0], expected)
    unlike: list[Any] = [[[1.0], [1.0, 2.0]], [[1.0], None], [[], []]]
    for ragged in unlike:
        lists = arrow.array(ragged, arrow.list_(arrow.float64()))
        path = parquet_of(tmp_path, vector=lists, kind=["a", "b"])
        with pytest.raises(DataError, match="lists of different lengths, or no"):
            loaded(str(path))
    lists = arrow.array([[1.0, None], [1.0, 2.0]])
    path = parquet_of(tmp_path, vector=lists, kind=["a", "b"])
    with pytest.raises(DataError, match=r"missing, not finite .*vector\[1\] 1"):
        loaded(str(path))
