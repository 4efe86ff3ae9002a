"""Sites that agreed on text: ids of characters in arrays, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic_core import to_jsonable_python

from knnper.data.examples import InputSpec
from knnper.data.images import decoded
from knnper.data.site_data import (
    ArrayInputs,
    SitesSettings,
    SiteTask,
    fit_inputs,
    sites_settings,
)
from knnper.errors import DataError, Problem
from knnper.loading import parse_settings

TEXT = SiteTask(
    InputSpec((1, 1, 4), 3, (), (), dtype="token"), ("'a'", "'b'", "unknown")
)


def test_what_is_agreed_on_is_read_again() -> None:
    document = to_jsonable_python(sites_settings(TEXT))
    settings = parse_settings(SitesSettings, document, "data", [])
    assert settings is not None
    assert settings.task() == TEXT


def test_text_has_no_mean() -> None:
    document = to_jsonable_python(sites_settings(TEXT)) | {"mean": [0.0] * 4}
    problems: list[Problem] = []
    assert parse_settings(SitesSettings, document, "data", problems) is None
    assert "found 4 values of mean, expected none" in str(problems[0])


@pytest.mark.parametrize("shape", [(2, 4), (2, 1, 1, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float64])
def test_ids_are_taken_from_any_numbers(shape: tuple[int, ...], dtype: Any) -> None:
    ids = np.array([[0, 1, 2, 0], [2, 2, 1, 0]])
    found = ArrayInputs("own.npz", ids.astype(dtype).reshape(shape)).read([1], TEXT)
    assert found.images.tolist() == [[[[2, 2, 1, 0]]]]
    assert str(found.images.dtype) == "torch.uint8"


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_an_id_of_no_character_is_refused(dtype: Any) -> None:
    ids = np.array([[0, 1, 3, 0]], dtype=dtype)
    message = r"such as 3, expected whole numbers from 0 to 2: .* agreed on text"
    with pytest.raises(DataError, match=message):
        fit_inputs(ids, TEXT.spec, "own.npz")


def test_an_image_is_no_text() -> None:
    message = "picture.png: image files have 1 or 3 channels, but inputs of the shape 1"
    with pytest.raises(DataError, match=message):
        decoded([Path("picture.png")], (1, 1, 80))
