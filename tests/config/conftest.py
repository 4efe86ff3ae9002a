"""A small catalogue of made-up settings."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from knnper.errors import ConfigError
from knnper.experiment import Experiment
from knnper.experiment_file import Catalogue, load_experiment
from knnper.settings import (
    PositiveFloat,
    PositiveInt,
    Settings,
    UnitInterval,
)


@dataclass(frozen=True)
class Nothing(Settings):
    pass


@dataclass(frozen=True)
class Dirichlet(Settings):
    alpha: PositiveFloat
    num_clients: PositiveInt = 10
    unseen_fraction: UnitInterval = 0.0


@dataclass(frozen=True)
class Memory(Settings):
    knn_weights: tuple[UnitInterval, ...] = (0.0, 0.5)
    kernel: Literal["paper", "squared"] = "paper"
    capacity: PositiveInt | Literal["all"] = "all"
    note: str = ""
    approximate: bool = False

    def __post_init__(self) -> None:
        if self.approximate and self.kernel == "squared":
            raise ValueError("approximate search knows the kernel 'paper' only")


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    return Catalogue(
        data={"digits": Nothing, "cifar10": Nothing},
        partition={"dirichlet": Dirichlet},
        model={"tiny_cnn": Nothing},
        method={"knn_per": Nothing, "fedavg": Nothing},
        personalization={"knn": Memory, "none": Nothing},
        personalization_of={"knn_per": "knn", "fedavg": "none"},
        check=lambda experiment: (),
    )


@dataclass
class Basis:
    """A document, which tests change, and what it chooses from."""

    document: dict[str, Any]
    catalogue: Catalogue

    def load(self, *overrides: str) -> Experiment:
        return load_experiment(self.document, self.catalogue, overrides)

    def problems(self, *overrides: str) -> dict[str, str]:
        with pytest.raises(ConfigError) as caught:
            self.load(*overrides)
        return {problem.place: problem.message for problem in caught.value.problems}


@pytest.fixture
def basis(catalogue: Catalogue) -> Basis:
    """Return the shortest valid experiment."""
    document = {
        "name": "demo",
        "data": {"name": "digits"},
        "partition": {"name": "dirichlet", "alpha": 0.3},
        "model": {"name": "tiny_cnn"},
        "method": {"name": "knn_per"},
    }
    return Basis(document, catalogue)
