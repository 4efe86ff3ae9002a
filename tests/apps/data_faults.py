"""Faults in a site's data, each of which holds private values."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

NAME, NUMBER = "Zacharias", "8675309"
"""What no server may see: both are in data, and the first is in names of files, too."""

CLASSES = ("none", "HIV")
COLUMNS = ("age", "dose")


@dataclass(frozen=True)
class Fault:
    """What is wrong with a site's data."""

    kind: str  # of the federation's data: rows, images or text
    code: str  # that the server gets
    # Writes the data into a folder; returns the site's settings of it.
    write: Callable[[Path], dict[str, Any]]


FAULTS: dict[str, Fault] = {}


def fault(
    kind: str, code: str
) -> Callable[[Callable[[Path], dict[str, Any]]], Callable[[Path], dict[str, Any]]]:
    """Return a decorator that adds a fault by the name of the function."""

    def added(write: Callable[[Path], dict[str, Any]]) -> Any:
        FAULTS[write.__name__] = Fault(kind, code, write)
        return write

    return added


def rows(count: int = 40) -> list[str]:
    """Return lines of a table without faults: a header, and one for each row."""
    header = f"name,diagnosis,{','.join(COLUMNS)}"
    values = (f"{number}.5,{count - number}" for number in range(count))
    lines = [f"P{n},{CLASSES[n % 2]},{one}" for n, one in enumerate(values)]
    return [header, *lines]


def table(folder: Path, lines: list[str], **settings: Any) -> dict[str, Any]:
    """Write a CSV file; return the settings of it."""
    path = folder / f"{NAME}.csv"
    path.write_text("\n".join(lines) + "\n")
    return {
        "name": "table",
        "path": path.name,
        "label": "diagnosis",
        "id": "name",
        **settings,
    }


def changed(row: int, line: str) -> list[str]:
    """Return the lines of a table of which one is replaced."""
    lines = rows()
    lines[row - 1] = line
    return lines


@fault("rows", "unreadable_row")
def row_with_a_comma_too_many(folder: Path) -> dict[str, Any]:
    return table(folder, changed(5, f"{NAME},HIV,41,0.5,{NUMBER}"))


@fault("rows", "unreadable_row")
def row_with_a_value_too_few(folder: Path) -> dict[str, Any]:
    return table(folder, changed(7, f"{NAME},{NUMBER}"))


@fault("rows", "wrong_columns")
def word_among_numbers(folder: Path) -> dict[str, Any]:
    return table(folder, changed(9, f"{NAME},HIV,{NAME}{NUMBER},0.5"))


@fault("rows", "not_a_number")
def word_below_many_numbers(folder: Path) -> dict[str, Any]:
    # The type of a column is guessed from the first megabyte.
    return table(folder, [*rows(60_000), f"{NAME},HIV,{NAME}{NUMBER},0.5"])


@fault("rows", "wrong_columns")
def column_of_words(folder: Path) -> dict[str, Any]:
    lines = rows()
    words = [f"{one.rpartition(',')[0]},{NAME}" for one in lines[1:]]
    return table(folder, [lines[0], *words])


@fault("rows", "value_not_allowed")
def missing_feature(folder: Path) -> dict[str, Any]:
    return table(folder, changed(5, f"{NAME},HIV,,{NUMBER}"))


@fault("rows", "value_not_allowed")
def number_beyond_float32(folder: Path) -> dict[str, Any]:
    return table(folder, changed(5, f"{NAME},HIV,{NUMBER}e40,1"))


@fault("rows", "missing_value")
def missing_label(folder: Path) -> dict[str, Any]:
    return table(folder, changed(5, f"{NAME},,{NUMBER},1"))


@fault("rows", "duplicate_id")
def the_same_id_twice(folder: Path) -> dict[str, Any]:
    return table(folder, [*rows(), *[f"{NAME},HIV,{NUMBER},1"] * 2])


@fault("rows", "duplicate_id")
def empty_id(folder: Path) -> dict[str, Any]:
    return table(folder, changed(5, f",HIV,{NUMBER},1"))


@fault("rows", "unknown_label")
def unknown_label(folder: Path) -> dict[str, Any]:
    return table(folder, changed(5, f"P3,{NAME},{NUMBER},1"))


@fault("rows", "wrong_label_map")
def label_map_to_an_unknown_label(folder: Path) -> dict[str, Any]:
    return table(folder, rows(), label_map={"none": f"{NAME}{NUMBER}"})


@fault("rows", "unknown_split")
def unknown_split(folder: Path) -> dict[str, Any]:
    return table(folder, changed(5, f"P3,HIV,{NAME},1"), split="age", features=["dose"])


@fault("rows", "wrong_columns")
def table_without_header(folder: Path) -> dict[str, Any]:
    return table(folder, [f"{NAME},HIV,{NUMBER},1", *rows()[1:]])


@fault("rows", "wrong_columns")
def column_that_is_not_in_the_table(folder: Path) -> dict[str, Any]:
    return table(folder, rows(), label=f"{NAME}{NUMBER}")


@fault("rows", "wrong_columns")
def the_same_column_twice(folder: Path) -> dict[str, Any]:
    return table(folder, changed(1, f"name,diagnosis,{NAME},{NAME}"), features=[NAME])


@fault("rows", "wrong_shape")
def other_number_of_features(folder: Path) -> dict[str, Any]:
    return table(folder, changed(5, f"{NAME},HIV,{NUMBER},1"), features=["age"])


@fault("rows", "unreadable_file")
def table_that_is_empty(folder: Path) -> dict[str, Any]:
    settings = table(folder, rows())
    (folder / settings["path"]).write_text("")
    return settings


@fault("rows", "no_examples")
def table_of_a_header_alone(folder: Path) -> dict[str, Any]:
    return table(folder, rows()[:1])


def written(folder: Path, content: bytes, name: str) -> dict[str, Any]:
    """Write a table's bytes; return the settings of it."""
    settings = {**table(folder, rows()), "path": name}
    (folder / name).write_bytes(content)
    return settings


@fault("rows", "unreadable_file")
def table_in_another_encoding(folder: Path) -> dict[str, Any]:
    content = "\n".join(changed(5, f"{NAME},Á{NUMBER},1,1")).encode("latin-1")
    return written(folder, content, f"{NAME}.csv")


@fault("rows", "wrong_columns")
def table_with_another_delimiter(folder: Path) -> dict[str, Any]:
    lines = changed(1, f"name;diagnosis;age;{NAME}{NUMBER}")
    return table(folder, [one.replace(",", ";") for one in lines])


@fault("rows", "unreadable_file")
def quote_that_is_not_closed(folder: Path) -> dict[str, Any]:
    return table(folder, changed(5, f'"{NAME},HIV,{NUMBER},1'))


@fault("rows", "wrong_columns")
def features_in_another_order(folder: Path) -> dict[str, Any]:
    lines = changed(5, f"{NAME},HIV,{NUMBER},1")
    return table(folder, lines, features=[*reversed(COLUMNS)])


@fault("rows", "unreadable_data")
def table_with_another_suffix(folder: Path) -> dict[str, Any]:
    return written(folder, b"", f"data.{NAME}{NUMBER}")


@fault("rows", "missing_file")
def table_that_does_not_exist(folder: Path) -> dict[str, Any]:
    return table(folder, rows(), path=f"{NAME}{NUMBER}.csv")


@fault("rows", "missing_file")
def table_that_is_a_folder(folder: Path) -> dict[str, Any]:
    (folder / f"{NAME}{NUMBER}.csv").mkdir()
    return table(folder, rows(), path=f"{NAME}{NUMBER}.csv")


@fault("rows", "unreadable_file")
def parquet_that_is_none(folder: Path) -> dict[str, Any]:
    return written(folder, f"PAR1{NAME}{NUMBER}".encode(), f"{NAME}.parquet")


def parquet(folder: Path, **columns: Any) -> dict[str, Any]:
    """Write a Parquet file; return the settings of it."""
    arrow: Any = pytest.importorskip("pyarrow")
    files: Any = pytest.importorskip("pyarrow.parquet")
    names = [f"P{number}" for number in range(8)]
    whole = {"name": names, "diagnosis": [*CLASSES] * 4}
    settings = {**table(folder, rows()), "path": f"{NAME}.parquet"}
    files.write_table(arrow.table({**whole, **columns}), folder / settings["path"])
    return settings


@fault("rows", "unreadable_file")
def parquet_that_is_cut_short(folder: Path) -> dict[str, Any]:
    settings = parquet(folder, age=[float(NUMBER)] * 8, dose=[NAME] * 8)
    path = folder / settings["path"]
    path.write_bytes(path.read_bytes()[:-20])
    return settings


@fault("rows", "wrong_columns")
def parquet_with_texts_as_features(folder: Path) -> dict[str, Any]:
    return parquet(folder, age=[float(NUMBER)] * 8, dose=[NAME] * 8)


@fault("rows", "wrong_columns")
def parquet_with_lists_of_different_lengths(folder: Path) -> dict[str, Any]:
    lists = [[float(NUMBER)] * (1 + number % 2) for number in range(8)]
    settings = parquet(folder, **{NAME: lists})
    return {**settings, "features": [NAME]}


@fault("rows", "wrong_columns")
def parquet_with_lists_as_labels(folder: Path) -> dict[str, Any]:
    return parquet(folder, age=[1.0] * 8, dose=[1.0] * 8, diagnosis=[[NAME]] * 8)


@fault("rows", "value_not_allowed")
def parquet_with_nothing_in_a_row(folder: Path) -> dict[str, Any]:
    return parquet(folder, age=[None, *[float(NUMBER)] * 7], dose=[1.0] * 8)


def npz(folder: Path, **arrays: Any) -> dict[str, Any]:
    """Write an NPZ file; return the settings of it."""
    np.savez(folder / f"{NAME}.npz", **arrays)
    return {"name": "npz", "path": f"{NAME}.npz"}


def arrays(**changes: Any) -> dict[str, Any]:
    """Return arrays of rows without faults, changed; None leaves one out."""
    found = {
        "inputs": np.full((8, 2), float(NUMBER)),
        "labels": np.array([*CLASSES] * 4),
        **changes,
    }
    return {name: value for name, value in found.items() if value is not None}


@fault("rows", "missing_file")
def npz_that_does_not_exist(folder: Path) -> dict[str, Any]:
    return {"name": "npz", "path": f"{NAME}{NUMBER}.npz"}


@fault("rows", "unreadable_file")
def npz_that_is_none(folder: Path) -> dict[str, Any]:
    (folder / f"{NAME}.npz").write_text(NAME + NUMBER)
    return {"name": "npz", "path": f"{NAME}.npz"}


@fault("rows", "unreadable_file")
def npz_with_a_pickle(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(inputs=np.array([NAME, int(NUMBER)], dtype=object)))


@fault("rows", "wrong_layout")
def npz_with_another_array(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(labels=None, **{NAME: np.zeros(8)}))


@fault("rows", "wrong_layout")
def npz_with_the_same_array_under_two_names(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(x=np.full((8, 2), float(NUMBER))))


@fault("rows", "wrong_columns")
def npz_with_another_feature(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(feature_names=np.array(["age", NAME])))


@fault("rows", "wrong_layout")
def npz_with_too_few_names_of_features(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(feature_names=np.array([NAME])))


@fault("rows", "wrong_shape")
def npz_with_too_few_labels(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(labels=np.array([NAME, NUMBER])))


@fault("rows", "wrong_shape")
def npz_with_labels_that_are_fractions(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(labels=np.full(8, float(NUMBER) + 0.5)))


@fault("rows", "wrong_shape")
def npz_with_splits_of_different_forms(folder: Path) -> dict[str, Any]:
    parts = {
        "train_inputs": np.full((4, 2), float(NUMBER)),
        "test_inputs": np.full((4, 3), float(NUMBER)),
    }
    labels = dict.fromkeys(("train_labels", "test_labels"), np.array([*CLASSES] * 2))
    return npz(folder, **parts, **labels)


@fault("rows", "wrong_shape")
def npz_of_another_shape(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(inputs=np.full((8, int(NUMBER) % 100), 1.0)))


@fault("rows", "wrong_layout")
def npz_with_labels_beyond_class_names(folder: Path) -> dict[str, Any]:
    labels = np.array([0, int(NUMBER)] * 4)
    return npz(folder, **arrays(labels=labels, class_names=np.array([NAME, "HIV"])))


@fault("rows", "unknown_label")
def npz_with_an_unknown_label(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(labels=np.array([NAME, NUMBER] * 4)))


@fault("rows", "duplicate_id")
def npz_with_a_name_twice(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(names=np.array([NAME, NUMBER] * 4)))


@fault("rows", "unknown_split")
def npz_with_an_unknown_split(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(split=np.array(["train", NAME] * 4)))


@fault("rows", "value_not_allowed")
def npz_with_a_value_that_is_infinite(folder: Path) -> dict[str, Any]:
    inputs = np.full((8, 2), float(NUMBER))
    inputs[1, 1] = np.inf
    return npz(folder, **arrays(inputs=inputs))


@fault("images", "value_not_allowed")
def npz_with_pixels_beyond_white(folder: Path) -> dict[str, Any]:
    return npz(folder, **arrays(inputs=np.full((8, 4, 4, 1), int(NUMBER))))


def folders(folder: Path, split: str = "") -> Path:
    """Write eight images of both classes; return the folder of the classes."""
    root = folder / f"{NAME}{NUMBER}" / split
    for number in range(8):
        path = root / CLASSES[number % 2] / f"{NAME}-{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), 20 * number, np.uint8)).save(path)
    return root


IMAGE_FOLDER = {"name": "image_folder", "path": f"{NAME}{NUMBER}"}


@fault("images", "missing_file")
def image_folder_that_does_not_exist(folder: Path) -> dict[str, Any]:
    return IMAGE_FOLDER


@fault("images", "unreadable_examples")
def images_that_are_none(folder: Path) -> dict[str, Any]:
    for number in range(2):
        (folders(folder) / "HIV" / f"{NAME}{number}.png").write_text(NUMBER)
    return IMAGE_FOLDER


@fault("images", "unreadable_examples")
def image_that_is_cut_short(folder: Path) -> dict[str, Any]:
    path = folders(folder) / "HIV" / f"{NAME}-1.png"
    path.write_bytes(path.read_bytes()[:50])
    return IMAGE_FOLDER


@fault("images", "unknown_label")
def image_folder_of_an_unknown_class(folder: Path) -> dict[str, Any]:
    root = folders(folder)
    (root / "HIV").rename(root / NAME)
    return IMAGE_FOLDER


@fault("images", "wrong_layout")
def folder_among_images(folder: Path) -> dict[str, Any]:
    (folders(folder) / "HIV" / f"{NAME}.d").mkdir()
    return IMAGE_FOLDER


@fault("images", "wrong_layout")
def image_among_folders(folder: Path) -> dict[str, Any]:
    root = folders(folder)
    (root / "HIV" / f"{NAME}-1.png").rename(root / f"{NAME}.png")
    return IMAGE_FOLDER


@fault("images", "wrong_layout")
def folder_of_an_unknown_split(folder: Path) -> dict[str, Any]:
    folders(folder, NAME)
    folders(folder, "train")
    return IMAGE_FOLDER


@fault("images", "no_examples")
def image_folder_that_is_empty(folder: Path) -> dict[str, Any]:
    (folder / f"{NAME}{NUMBER}").mkdir()
    return IMAGE_FOLDER


@fault("rows", "wrong_kind")
def images_where_rows_are_expected(folder: Path) -> dict[str, Any]:
    folders(folder)
    return IMAGE_FOLDER


def image_table(folder: Path, line: str) -> dict[str, Any]:
    """Write a table of images' paths, with a line more; return the settings of it."""
    root = folders(folder)
    files = [
        f"{path.relative_to(folder)},{path.parent.name}" for path in root.rglob("*.png")
    ]
    return table(folder, ["file,diagnosis", *files, line], image="file", id="file")


@fault("images", "unreadable_examples")
def table_of_an_image_that_does_not_exist(folder: Path) -> dict[str, Any]:
    return image_table(folder, f"{NAME}/{NUMBER}.png,HIV")


@fault("images", "missing_value")
def table_of_images_without_a_path(folder: Path) -> dict[str, Any]:
    return {**image_table(folder, ",HIV"), "id": None}


TEXT = {"name": "text", "path": f"{NAME}{NUMBER}.txt"}


@fault("text", "missing_file")
def text_that_does_not_exist(folder: Path) -> dict[str, Any]:
    return TEXT


@fault("text", "unreadable_file")
def text_in_another_encoding(folder: Path) -> dict[str, Any]:
    (folder / TEXT["path"]).write_bytes(f"{NAME} Á {NUMBER} ".encode("latin-1") * 20)
    return TEXT


@fault("text", "no_examples")
def text_that_is_too_short(folder: Path) -> dict[str, Any]:
    (folder / TEXT["path"]).write_text(NAME)
    return TEXT


@fault("rows", "wrong_kind")
def text_where_rows_are_expected(folder: Path) -> dict[str, Any]:
    (folder / TEXT["path"]).write_text(NAME * 100)
    return TEXT


def code(folder: Path, lines: str) -> dict[str, Any]:
    """Write a function that reads data; return the settings of it."""
    (folder / "reader.py").write_text(f"NAME, NUMBER = {NAME!r}, {NUMBER!r}\n{lines}\n")
    return {"name": "reader:read"}


READ = "def read(base):\n    "


@fault("rows", "own_code_failed")
def code_that_raises_a_row(folder: Path) -> dict[str, Any]:
    return code(folder, f"{READ}raise ValueError(f'cannot read {{NAME}} {{NUMBER}}')")


@fault("rows", "own_code_failed")
def code_that_raises_an_error_named_like_a_row(folder: Path) -> dict[str, Any]:
    return code(folder, f"{READ}raise type(NAME, (LookupError,), {{}})(NUMBER)")


@fault("rows", "own_code_failed")
def code_that_opens_a_file_that_does_not_exist(folder: Path) -> dict[str, Any]:
    return code(folder, f"{READ}open(NAME + NUMBER)")


@fault("rows", "unreadable_data")
def code_that_raises_an_error_of_ours(folder: Path) -> dict[str, Any]:
    imported = "from knnper.errors import DataError\n"
    return code(folder, f"{imported}{READ}raise DataError(NAME + NUMBER)")


@fault("rows", "unreadable_data")
def code_that_gives_an_error_reasons_of_its_own(folder: Path) -> dict[str, Any]:
    imported = "from knnper.errors import DataError\n"
    raising = "error = DataError(NAME)\n    error.reasons = (NAME + NUMBER,)"
    return code(folder, f"{imported}{READ}{raising}\n    raise error")


@fault("rows", "own_code")
def code_that_returns_no_arrays(folder: Path) -> dict[str, Any]:
    return code(folder, f"{READ}return {{NAME: [NUMBER]}}")


@fault("rows", "own_code")
def code_that_returns_a_broken_array(folder: Path) -> dict[str, Any]:
    array = (
        "class Array:\n    def __array__(*_, **__):\n        raise ValueError(NAME)\n"
    )
    return code(folder, f"{array}{READ}return {{'inputs': Array(), 'labels': []}}")
