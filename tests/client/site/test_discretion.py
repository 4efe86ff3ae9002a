"""What leaves a site, and what stays in its own log."""

import math
from pathlib import Path

import pytest
import torch

from knnper.client.flower_node import without_folders
from knnper.client.site import OWN_LOG, Discretion
from knnper.errors import DataError, RunError
from knnper.strategies.core.predictors import ClientResults
from knnper.strategies.core.records import ModelUpdate

QUIET, OPEN = Discretion(share_metrics=False), Discretion(share_metrics=True)
TROUBLE = "/home/site/patients/John_Doe.png cannot be read"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TROUBLE, "John_Doe.png cannot be read"),
        ("data/patients/x.png cannot be read", "x.png cannot be read"),
        ("no such file: '/home/a b/c d.npz'", "no such file: 'c d.npz'"),
        ("there is no /srv/data/train/; make it", "there is no train; make it"),
        ("expected ../x/y.csv, found ~/z.csv", "expected y.csv, found z.csv"),
        (
            "see https://a.org/b.html, and/or 1/2",
            "see https://a.org/b.html, and/or 1/2",
        ),
        ("a client's file /a/b is the server's", "a client's file b is the server's"),
        ("train/00012 has no label", "train/00012 has no label"),
    ],
)
def test_a_path_leaves_as_the_name_of_its_file(text: str, told: str) -> None:
    assert without_folders(text) == told


def test_failures_are_told_in_words_that_tell_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    results = ClientResults((), {"site-a": TROUBLE})
    assert QUIET.results(results).failures == {"site-a": OWN_LOG}
    told = OPEN.results(results).failures
    assert told == {"site-a": "John_Doe.png cannot be read"}


@pytest.mark.parametrize(
    "error", [DataError(TROUBLE), FileNotFoundError(2, "gone", TROUBLE), KeyError("x")]
)
def test_the_own_log_has_all_of_an_error(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunError) as caught, QUIET.around("reading"):
        raise error
    assert str(caught.value) == OWN_LOG
    assert str(error) in caplog.text


def test_of_an_unknown_error_the_kind_is_told() -> None:
    with pytest.raises(RunError, match=r"^ValueError: x\.png$"), OPEN.around("reading"):
        raise ValueError("/a/x.png")


def test_an_update_without_its_loss_keeps_its_weight() -> None:
    update = ModelUpdate(torch.ones(2), 3, 0.5)
    assert OPEN.update(update) is update
    quiet = QUIET.update(update)
    assert quiet.num_examples == 3
    assert math.isnan(quiet.train_loss)


def test_names_of_files_are_all_that_is_left_of_paths(tmp_path: Path) -> None:
    text = f"{tmp_path}/a.npz: expected {tmp_path}/b.npz"
    assert without_folders(text) == "a.npz: expected b.npz"
