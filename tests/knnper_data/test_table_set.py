"""A central data set in tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.config.errors import DataError
from knnper.data.catalogue import DATA_SETS
from knnper.data.dataset import Dataset
from knnper.data.table_set import TableSettings, load_table

pytest.importorskip("pyarrow")

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
    return load_table(TableSettings(path, "kind", **settings))


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
    again, other = loaded(path, test_fraction=0.25), loaded(path, seed=1)
    np.testing.assert_array_equal(data.test.images, again.test.images)
    assert data.test.images.tolist() != other.test.images.tolist()


def test_clients_are_numbered_in_the_order_of_their_names(tmp_path: Path) -> None:
    test = put(tmp_path, "dose,kind,age,ward\n7,a,5,w10\n", "test.csv")
    data = loaded(put(tmp_path, ROWS), test=test, client="ward")
    assert data.feature_names == ("age", "dose")
    assert data.train.client_ids is not None
    assert data.test.client_ids is not None
    assert data.train.client_ids.tolist() == [2, 0, 2, 0]
    assert data.test.client_ids.tolist() == [1]
    np.testing.assert_array_equal(data.test.images, [[[[5, 7]]]])


def test_classes_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    rows = "".join(f"0.5,{label}\n" for label in (10, 9, 10, 2))
    path = put(tmp_path, f"x,kind\n{rows}")
    data = loaded(path, test=path)
    assert data.class_names == ("2", "9", "10")
    assert data.train.labels.tolist() == [2, 1, 2, 0]


def test_what_cannot_be_learned_from(tmp_path: Path) -> None:
    path = put(tmp_path, ROWS)
    other = put(tmp_path, "age,kind,dose,ward\n1,c,2,w1\n", "test.csv")
    with pytest.raises(DataError, match="labels that no training row has: c"):
        loaded(path, test=other, client="ward")
    with pytest.raises(DataError, match="there are no test rows"):
        loaded(path, test_fraction=0.0, client="ward")
    empty = put(tmp_path, "age,kind\n1,\n", "empty.csv")
    with pytest.raises(DataError, match="1 rows hold nothing in the column 'kind'"):
        loaded(empty)
    with pytest.raises(DataError, match=r"found the columns ward \(string\)"):
        loaded(path)


def test_it_is_in_the_catalogue() -> None:
    assert DATA_SETS["table"].settings_type is TableSettings
