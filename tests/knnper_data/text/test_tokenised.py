"""Texts of a column as ids, in an experiment and at a site."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from knnper.data.catalogue import DATA_SETS, SITE_DATA, load_data
from knnper.data.examples import Dataset, InputSpec, Vocabulary
from knnper.data.normalization import normalizer
from knnper.data.site import open_site, survey_site
from knnper.data.site_task import SiteTask, sites_settings, task_of
from knnper.errors import DataError, Problem
from knnper.settings import Choice, Settings, parse_settings
from tests.knnper_data.text.tokenizers_made import make_tokenizer

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

WORDS = tuple(f"w{number}" for number in range(300))
ROWS = """said,mood,who
w0 w299,sad,zoe
W1,glad,adam
w2 unheard w3 w4 w5,sad,zoe
w6,glad,adam
"""


def chosen(known: Any, **values: Any) -> Choice[Settings]:
    problems: list[Problem] = []
    settings = parse_settings(known["table"], values, "data", problems)
    assert settings is not None, problems
    return Choice("table", settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "tokenizer", WORDS)
    (tmp_path / "train.csv").write_text(ROWS)
    (tmp_path / "test.csv").write_text("who,said,mood\nadam,w7,glad\n")
    return tmp_path


def central(folder: Path, **changes: Any) -> Dataset:
    values = {
        "train": str(folder / "train.csv"),
        "test": str(folder / "test.csv"),
        "label": "mood",
        "text": "said",
        "tokenizer": str(folder / "tokenizer"),
        "max_tokens": 5,
        "client": "who",
    }
    return load_data(chosen(DATA_SETS, **{**values, **changes}))


def test_ids_are_padded_and_cut(folder: Path) -> None:
    for data in (central(folder), central(folder)):  # made, and from the cache
        assert data.class_names == ("glad", "sad")
        assert data.client_names == ("adam", "zoe")
        np.testing.assert_array_equal(data.train.client_ids, [1, 0, 1, 0])
        assert data.train.images.dtype == np.int32
        # [CLS] the words, from the id 4 on [SEP], and padding.
        np.testing.assert_array_equal(
            data.train.images[:, 0, 0],
            [[2, 4, 303, 3, 0], [2, 5, 3, 0, 0], [2, 6, 1, 7, 3], [2, 10, 3, 0, 0]],
        )
        found = data.spec.vocabulary
        assert found is not None
        assert data.spec == InputSpec((1, 1, 5), 2, (), (), "ids", found)
        assert (found.size, found.padding_id) == (304, 0)
    ids = normalizer(data.spec)(torch.from_numpy(np.array(data.train.images)))
    assert (ids.dtype, ids.shape) == (torch.int64, (4, 5, 1, 1))
    assert ids[0].flatten().tolist() == [2, 4, 303, 3, 0]


def test_a_tokenizer_that_has_nothing_to_fill_up_with(folder: Path) -> None:
    other = make_tokenizer(folder / "without", WORDS, None)
    with pytest.raises(DataError, match="neither a padding nor an end token"):
        central(folder, tokenizer=str(other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 65}, "max_tokens 65, but .* texts of at most 64; lower it"),
        ({"tokenizer": "no/where"}, r"not a folder, and .* data\.download=true"),
        ({"tokenizer": "."}, r"holds no tokenizer .* expected what save_pretrained"),
        ({"text": "words"}, "has no column 'words'; known: mood, said, who"),
    ],
)
def test_what_is_refused(
    folder: Path,
    changes: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder / "empty")
    with pytest.raises(DataError, match=message):
        central(folder, **changes)


def test_texts_come_with_a_tokenizer() -> None:
    problems: list[Problem] = []
    values = {"train": "a.csv", "label": "y", "text": "said", "features": ["a"]}
    assert parse_settings(DATA_SETS["table"], values, "data", problems) is None
    values.pop("features")
    assert parse_settings(DATA_SETS["table"], values, "data", problems) is None
    assert "found features and text, expected one of them" in str(problems[0])
    assert "'said' with the tokenizer None, expected both" in str(problems[1])


def test_a_site_reads_texts_as_the_federation_does(folder: Path) -> None:
    data = central(folder)
    task = task_of(data)
    assert sites_settings(task).task() == task
    site = chosen(
        SITE_DATA,
        path="train.csv",
        label="mood",
        text="said",
        tokenizer="tokenizer",
        max_tokens=5,
        fractions={"validation": 0.0, "test": 0.0},
    )
    found = open_site(site, folder, task).train.examples
    np.testing.assert_array_equal(found.images.numpy(), data.train.images)
    np.testing.assert_array_equal(found.labels.numpy(), data.train.labels)
    # By itself, it says what it would be learned from.
    own = survey_site(site, folder, None).task
    assert own.spec.vocabulary == data.spec.vocabulary
    assert own.class_names == ("glad", "sad")
    make_tokenizer(folder / "tokenizer2", (*WORDS[1:], WORDS[0]))
    other = replace(site.settings, tokenizer="tokenizer2")  # type: ignore[call-arg]
    with pytest.raises(DataError, match="another tokenizer than the federation's"):
        open_site(Choice("table", other), folder, task)


def test_ids_of_no_vocabulary() -> None:
    spec = InputSpec((1, 1, 2), 2, (), (), "ids", Vocabulary(5, 0))
    assert spec.torch_dtype == torch.int32
    for wrong in (5, -1):
        with pytest.raises(DataError, match=f"found the id {wrong} in a text.* to 4"):
            normalizer(spec)(torch.tensor([[[[0, wrong]]]], dtype=torch.int32))
    with pytest.raises(ValueError, match="expected a vocabulary with 'ids'"):
        InputSpec((1, 1, 2), 2, (), (), "ids")
    with pytest.raises(ValueError, match="expected one of the 5 ids"):
        Vocabulary(5, 5)
    assert SiteTask(spec, ("a", "b")).spec.largest_whole == 4
