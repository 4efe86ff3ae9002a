import json

import pytest

from knnper.errors import ConfigError
from knnper.experiment_file import (
    Catalogue,
    from_json,
    load_experiment,
    results_identity,
    to_document,
    to_json,
    to_yaml,
)
from knnper.settings import dotted
from knnper.yaml_text import parse_yaml
from tests.config.conftest import Basis


def test_the_document_is_complete(basis: Basis) -> None:
    complete = to_document(basis.load())
    assert list(complete)[-3:] == ["method", "personalization", "run"]
    partition = {"alpha": 0.3, "num_clients": 10, "unseen_fraction": 0.0}
    assert complete["partition"] == {"name": "dirichlet", **partition}
    assert complete["personalization"]["knn_weights"] == [0.0, 0.5]
    assert complete["training"]["schedule"] == {"name": "constant"}


def test_damaged_json(catalogue: Catalogue) -> None:
    with pytest.raises(ConfigError, match=r"1 problem in message:\n.*no JSON"):
        from_json("{", catalogue, source="message")
    with pytest.raises(ConfigError, match="found 3, expected the keys"):
        from_json(json.dumps(3), catalogue)


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("name=other", True),
        ("run.engine=serial", True),
        ("run.num_workers=7", True),
        ("training.momentum=0", True),
        ("personalization.note='1e-3'", False),
        ("personalization.knn_weights=[]", False),
        ("personalization.capacity=3", False),
        ("training.schedule={name: multi_step, milestones: [3, 9]}", False),
        ("run.gpus_per_client=0", True),
        ("run.gpus_per_client=0.5", False),
        ("run.max_failed_fraction=0.25", False),
        ("run.max_update_norm_ratio=2", False),
        ("run.threads_per_worker=auto", False),
        ("training.precision=bfloat16", False),
        ("run.seed=1", False),
        ("training.num_rounds=51", False),
        ("personalization.kernel=squared", False),
        ("partition.alpha=0.31", False),
    ],
)
def test_identity_is_what_results_depend_on_and_every_form_is_the_experiment(
    basis: Basis, override: str, same: bool
) -> None:
    first, second = basis.load(), basis.load(override)
    assert (results_identity(first) == results_identity(second)) is same
    from_yaml = load_experiment(parse_yaml(to_yaml(second), "file"), basis.catalogue)
    from_document = load_experiment(to_document(second), basis.catalogue)
    assert from_yaml == from_document == second
    assert from_json(to_json(second), basis.catalogue) == second


def test_dotted_keys_lead_to_values_that_are_no_mappings() -> None:
    values = {"a": {"b": {"c": 1}, "d": [{"e": 2}]}, "f": None, "g": {}}
    assert dict(dotted(values)) == {"a.b.c": 1, "a.d": [{"e": 2}], "f": None}
    assert dict(dotted({"b": 1}, "a.")) == {"a.b": 1}
