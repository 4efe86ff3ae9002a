"""What `tiny` makes, as fixtures."""

from collections.abc import Callable
from typing import Any

import pytest

from knnper.data.examples import ClientData
from knnper.seeding import RandomKey
from knnper.strategies.core.task import Task
from tests.strategies import tiny
from tests.strategies.trained_methods import Trained, train_on_four_pixels


@pytest.fixture
def linear_task() -> Callable[..., Task]:
    return tiny.linear_task


@pytest.fixture
def normed_task() -> Callable[..., Task]:
    return tiny.normed_task


@pytest.fixture
def key() -> RandomKey:
    return tiny.KEY


@pytest.fixture
def white() -> Callable[..., ClientData]:
    return tiny.white


@pytest.fixture
def noisy() -> Callable[..., ClientData]:
    return tiny.noisy


@pytest.fixture
def run_rounds() -> Callable[..., tuple[Any, dict[str, Any]]]:
    return tiny.run_rounds


@pytest.fixture
def train() -> Callable[..., Trained]:
    return train_on_four_pixels
