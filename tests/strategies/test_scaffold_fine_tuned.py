"""SCAFFOLD, fine-tuned: `method: scaffold`, `personalization: fine_tuning`."""

from typing import Any

import pytest
import torch

from knnper.errors import ConfigError
from knnper.experiment import TrainingSettings
from knnper.loading import load_experiment
from knnper.seeding import RandomKey
from knnper.simulation.workbench import experiment_catalogue
from knnper.strategies.catalogue import PERSONALIZERS, title_of
from knnper.strategies.scaffold import Scaffold, ScaffoldPayload, ScaffoldSettings
from tests.strategies.trained_methods import MakeClient, MakeTask

DOCUMENT: dict[str, Any] = {
    "name": "test",
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "num_clients": 4, "alpha": 0.3},
    "model": {"name": "mlp"},
    "method": {"name": "scaffold"},
    "personalization": {"name": "fine_tuning", "num_epochs": 2},
}


def test_the_global_model_is_trained_on_without_controls(
    linear_task: MakeTask, white: MakeClient, key: RandomKey
) -> None:
    task = linear_task(TrainingSettings(learning_rate=0.5))
    on_top = PERSONALIZERS["fine_tuning"]
    tuned = on_top(task, Scaffold(task, ScaffoldSettings()), on_top.settings_type())
    far = torch.tensor([100.0, -100.0])
    payload = ScaffoldPayload(torch.zeros(2), control=far)
    served: Any = tuned.personalize(payload, None, white([0]), key)
    # A plain step of ½ from 0: the gradient is (-½, ½), whatever the controls are.
    assert served.weights.tolist() == [0.25, -0.25]
    assert not tuned.personalizes_by_inference


def test_it_is_an_experiment_of_its_own() -> None:
    experiment = load_experiment(DOCUMENT, experiment_catalogue())
    names = experiment.method.name, experiment.personalization.name
    assert names == ("scaffold", "fine_tuning")
    assert title_of(*names) == "SCAFFOLD + FT"


def test_momentum_is_refused_for_it_too() -> None:
    document = {**DOCUMENT, "training": {"momentum": 0.9}}
    with pytest.raises(ConfigError, match=r"found 0\.9, expected 0 with scaffold"):
        load_experiment(document, experiment_catalogue())
