"""An index's file: what is refused, and what it costs."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from knnper.datastore.examples import StoreDamagedError
from knnper.datastore.index import (
    FlatSettings,
    IndexSettings,
    ProductSettings,
    ScalarSettings,
)
from tests.datastore.index.index_cases import (
    CASES,
    DIM,
    NUM_LEARNT,
    case_name,
    clustered,
)

every_kind = pytest.mark.parametrize("case", CASES, ids=case_name)


@pytest.fixture(name="written")
def written_index(case: IndexSettings, tmp_path: Path) -> Path:
    """Return the file of an index."""
    path, ids = tmp_path / "index", np.arange(NUM_LEARNT)
    case.build(DIM, ids, clustered(NUM_LEARNT)).write(path)
    return path


@every_kind
@pytest.mark.parametrize("part", [0.0, 0.003, 0.3, 0.7, 0.999])
def test_a_file_that_is_cut_is_refused(
    case: IndexSettings, part: float, written: Path
) -> None:
    content = written.read_bytes()
    written.write_bytes(content[: int(part * len(content))])
    with pytest.raises(StoreDamagedError, match="build it anew from the vectors"):
        case.read(written, DIM)


@every_kind
def test_a_file_with_something_behind_it_is_refused(
    case: IndexSettings, written: Path
) -> None:
    with written.open("ab") as file:
        file.write(b"x")
    with pytest.raises(StoreDamagedError, match="expected its end"):
        case.read(written, DIM)


@every_kind
def test_an_index_of_other_vectors_is_refused(
    case: IndexSettings, written: Path
) -> None:
    with pytest.raises(StoreDamagedError, match=r"\(.*, 8, .*\), expected \(.*, 16, "):
        case.read(written, 2 * DIM)


@every_kind
def test_another_kind_is_refused(case: IndexSettings, written: Path) -> None:
    for other in CASES:
        if other.name != case.name and not isinstance(case, FlatSettings):
            with pytest.raises(StoreDamagedError, match="another index"):
                other.read(written, DIM)


@pytest.mark.parametrize("case", [ProductSettings(num_parts=4, num_bits=4)])
def test_codes_of_another_size_are_refused(case: IndexSettings, written: Path) -> None:
    with pytest.raises(StoreDamagedError, match="another index"):
        ProductSettings(num_parts=8, num_bits=4).read(written, DIM)


@pytest.mark.parametrize("case", [FlatSettings()], ids=case_name)
def test_ids_that_are_missing_are_noticed(case: IndexSettings, written: Path) -> None:
    content = bytearray(written.read_bytes())
    del content[32:40]
    content[8:16] = np.int64(NUM_LEARNT - 1).tobytes()
    written.write_bytes(content)
    with pytest.raises(StoreDamagedError, match="another index"):
        case.read(written, DIM)


@pytest.mark.parametrize("count", [-1, 2**60])
def test_a_number_of_ids_that_cannot_be_is_refused(count: int, tmp_path: Path) -> None:
    path = tmp_path / "index"
    FlatSettings().build(DIM, np.arange(3), clustered(3)).write(path)
    content = bytearray(path.read_bytes())
    content[8:16] = np.int64(count).tobytes()
    path.write_bytes(content)
    with pytest.raises(StoreDamagedError, match=r"expected -?\d+ bytes, found"):
        FlatSettings().read(path, DIM)


def test_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_bytes(b"an index of some sort, but of whom?")
    with pytest.raises(StoreDamagedError, match="expected the mark"):
        FlatSettings().read(path, DIM)
    with pytest.raises(StoreDamagedError, match="No such file"):
        FlatSettings().read(tmp_path / "none", DIM)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@every_kind
def test_a_full_disk_is_an_error(case: IndexSettings) -> None:
    index = case.build(DIM, np.arange(3), clustered(3))
    with pytest.raises(OSError, match="No space left"):
        index.write(Path("/dev/full"))


def test_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    index = ScalarSettings().build(DIM, np.arange(3), clustered(3))
    with pytest.raises(FileNotFoundError):
        index.write(tmp_path / "missing" / "index")


def test_a_file_may_move(tmp_path: Path) -> None:
    path = tmp_path / "index"
    FlatSettings().build(DIM, np.arange(3), clustered(3)).write(path)
    index = FlatSettings().read(Path(shutil.move(path, tmp_path / "it")), DIM)
    assert index.ids.tolist() == [0, 1, 2]
