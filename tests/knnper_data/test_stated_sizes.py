"""Sizes that files claim are compared with the files before memory is taken."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from knnper.data.arrays import NpzFileSettings, NpzSettings
from knnper.data.numpy_files import load_array, load_arrays
from knnper.datastore.transfer import read_inputs
from knnper.errors import DataError

SHAPE = (4, 2, 2, 3)


def npy(shape: tuple[int, ...], num_bytes: int, descr: str = "|u1") -> bytes:
    """Return an .npy file that claims a shape, and has so many bytes behind that."""
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + bytes(num_bytes)


def npz(path: Path, inputs: bytes) -> Path:
    labels = io.BytesIO()
    np.save(labels, np.arange(4) % 2)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", inputs)
        archive.writestr("labels.npy", labels.getvalue())
    return path


CLAIMS: dict[str, bytes] = {
    "more than there is": npy((4, 10**6, 10**6, 3), 48),
    "less than there is": npy(SHAPE, 4800),
    "less than nothing": npy((-4, 2, 2, 3), 48),
    "more than a number": npy((2**40, 2**40), 48, "<f8"),
    "no type": b"\x93NUMPY\x01\x00\x05\x00 { }\n",
    "another version": b"\x93NUMPY\x09\x00\x05\x00 { }\n",
    "nothing": b"",
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_an_array_is_as_large_as_it_claims(claim: str, tmp_path: Path) -> None:
    file = npz(tmp_path / "x.npz", CLAIMS[claim])
    (tmp_path / "x.npy").write_bytes(CLAIMS[claim])
    for attempt in (
        lambda: load_arrays(file, ("inputs",)),
        lambda: NpzSettings(path=str(file)).collect(tmp_path, None),
        lambda: NpzFileSettings(path=str(file)).load(),
        lambda: read_inputs(file, (2, 2, 3)),
        lambda: load_array(tmp_path / "x.npy"),
    ):
        with pytest.raises(DataError, match=r"x\.np[yz] cannot be read"):
            attempt()


def test_an_array_that_is_as_large_as_it_claims_is_read(tmp_path: Path) -> None:
    arrays = load_arrays(npz(tmp_path / "x.npz", npy(SHAPE, 48)), ("inputs", "labels"))
    assert (arrays["inputs"].shape, arrays["labels"].tolist()) == (SHAPE, [0, 1, 0, 1])
    for written in (np.zeros(()), np.zeros((0, 3)), np.asfortranarray(np.ones((3, 4)))):
        np.save(tmp_path / "x.npy", written)
        np.testing.assert_array_equal(load_array(tmp_path / "x.npy"), written)


def test_an_archive_that_expands_without_measure_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("knnper.data.numpy_files._LARGE_BYTES", 10**6)
    bomb = npz(tmp_path / "bomb.npz", npy((2000, 1000, 1), 2_000_000))
    assert bomb.stat().st_size < 10_000
    with pytest.raises(DataError, match=r"expands to 0\.0 GB, more than 200 times"):
        load_arrays(bomb, ("inputs",))
    drawn = np.random.default_rng(0).integers(0, 4, (2000, 1000, 1), np.uint8)
    np.savez_compressed(tmp_path / "fine.npz", inputs=drawn)
    assert (
        load_arrays(tmp_path / "fine.npz", ("inputs",))["inputs"].shape == drawn.shape
    )


@pytest.mark.parametrize("damage", ["encrypted", "flipped"])
def test_a_damaged_archive_is_told_as_data(damage: str, tmp_path: Path) -> None:
    drawn: Any = np.random.default_rng(0).integers(0, 4, SHAPE, np.uint8)
    file = tmp_path / "x.npz"
    np.savez_compressed(file, inputs=np.repeat(drawn, 100, axis=0))
    content = bytearray(file.read_bytes())
    if damage == "encrypted":
        for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            content[content.index(mark) + place] |= 1
    else:
        content[120:140] = bytes(20)
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        load_arrays(file, ("inputs",))
