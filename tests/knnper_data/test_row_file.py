from pathlib import Path

import numpy as np
import pytest

from knnper.data import cache as row_file
from knnper.data.cache import RowFile, rows_in_parts


@pytest.mark.parametrize("counts", [(), (0,), (1,), (3, 0, 2), (9, 99, 999)])
def test_numpy_reads_what_was_appended(tmp_path: Path, counts: tuple[int, ...]) -> None:
    path = tmp_path / "rows.npy"
    rows = np.arange(sum(counts) * 6, dtype=np.int64).reshape(-1, 2, 3)
    written = RowFile(path, (2, 3), rows.dtype)
    for part in np.split(rows, np.cumsum(counts)[:-1] if counts else []):
        written.append(part)
    assert written.finish() == rows.shape
    np.testing.assert_array_equal(np.load(path, allow_pickle=False), rows)


def test_rows_of_another_shape_are_refused(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.npy", (2,), np.dtype(np.uint8))
    with pytest.raises(ValueError, match=r"expected rows \(2,\)"):
        file.append(np.zeros((1, 3), dtype=np.uint8))


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        RowFile(path, (), np.dtype(np.int64))
    assert path.read_text() == "mine"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_parts_are_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(row_file, "_BYTES_AT_ONCE", 15)
    rows = np.arange(count * 4, dtype=np.uint8).reshape(count, 2, 2)
    np.save(tmp_path / "rows.npy", rows)
    parts = list(rows_in_parts(tmp_path / "rows.npy"))
    assert [len(part) for part in parts] == [3] * (count // 3) + [count % 3] * (
        count % 3 > 0
    )
    assert all(not isinstance(part, np.memmap) for part in parts)
    found = np.concatenate(parts) if parts else rows
    np.testing.assert_array_equal(found, rows)
