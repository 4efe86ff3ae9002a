"""What the tests of several methods do with a method or its entry in a catalogue."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from knnper.errors import ConfigError, Problem
from knnper.experiment import Experiment, RunSettings, TrainingSettings
from knnper.experiment_file import load_experiment
from knnper.settings import Choice, Settings
from knnper.simulation.catalogue import experiment_catalogue
from knnper.strategies.core.method import Method, Personalizer
from knnper.strategies.core.task import Task


def problems_of(
    spec: type[Method], settings: Settings, training: TrainingSettings | None = None
) -> Sequence[Problem]:
    """Return what an entry finds in an experiment with these settings of its own."""
    anything, choice = Choice("any", Settings()), Choice("own", settings)
    is_method = not issubclass(spec, Personalizer)
    experiment = Experiment(
        name="test",
        data=anything,
        partition=anything,
        model=anything,
        training=training or TrainingSettings(),
        method=choice if is_method else anything,
        personalization=anything if is_method else choice,
        run=RunSettings(),
    )
    return spec.check(settings, experiment)


def count_embeddings(task: Task) -> list[int]:
    """Return a list that grows with each forward pass, by the number of images."""
    sizes: list[int] = []
    module = task.model.module
    embed = module.embed

    def counted(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return embed(x)

    module.embed = counted  # type: ignore[method-assign]
    return sizes


def document(
    method: str | dict[str, Any] = "fedavg",
    personalization: str | dict[str, Any] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """Return an experiment on digits, of two clients if ``partition`` is not given."""
    return {
        "name": "small",
        "data": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 2},
        "model": {"name": "tiny_cnn"},
        "method": {"name": method} if isinstance(method, str) else method,
        **({} if personalization is None else {"personalization": personalization}),
        **sections,
    }


def refused(
    document: dict[str, Any], place: str, hint: str, catalogue: Any = None
) -> None:
    """Assert that an experiment has one problem, in this place, of these words."""
    with pytest.raises(ConfigError, match=hint) as caught:
        load_experiment(document, catalogue or experiment_catalogue())
    assert [problem.place for problem in caught.value.problems] == [place]
