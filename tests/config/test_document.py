import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.errors import ConfigError
from knnper.experiment import (
    Catalogue,
    dotted,
    from_json,
    load_experiment,
    parse_yaml,
    results_identity,
    to_document,
    to_json,
    to_yaml,
)
from tests.config.conftest import Basis

SCHEDULES = st.just({"name": "constant"}) | st.fixed_dictionaries(
    {
        "name": st.just("multi_step"),
        "milestones": st.sets(st.integers(1, 500), max_size=4).map(sorted),
        "factor": st.floats(0.001, 1.0),
    }
)
DOCUMENTS = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,9}", fullmatch=True),
        "data": st.just({"name": "digits"}),
        "partition": st.fixed_dictionaries(
            {"name": st.just("dirichlet"), "alpha": st.floats(1e-9, 1e9)},
            optional={"num_clients": st.integers(1, 10**6)},
        ),
        "model": st.just({"name": "tiny_cnn"}),
        "method": st.just({"name": "knn_per"}),
    },
    optional={
        "training": st.fixed_dictionaries(
            {},
            optional={
                "num_rounds": st.integers(1, 1000),
                "learning_rate": st.floats(1e-9, 10),
                "local_steps": st.none() | st.integers(1, 9),
                "schedule": SCHEDULES,
            },
        ),
        "personalization": st.fixed_dictionaries(
            {},
            optional={
                "knn_weights": st.lists(st.floats(0, 1), max_size=5),
                "capacity": st.just("all") | st.integers(1, 9),
                "note": st.text() | st.sampled_from(["1e-3", "no", "null"]),
            },
        ),
        "run": st.fixed_dictionaries({}, optional={"seed": st.integers(0, 2**63)}),
    },
)


@settings(max_examples=30, deadline=None)
@given(document=DOCUMENTS)
def test_an_experiment_survives_every_form(
    catalogue: Catalogue, document: dict[str, Any]
) -> None:
    experiment = load_experiment(document, catalogue)
    assert load_experiment(to_document(experiment), catalogue) == experiment
    assert from_json(to_json(experiment), catalogue) == experiment
    from_yaml = load_experiment(parse_yaml(to_yaml(experiment), "file"), catalogue)
    assert from_yaml == experiment


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
def test_identity_is_what_results_depend_on(
    basis: Basis, override: str, same: bool
) -> None:
    first = basis.load()
    second = basis.load(override)
    assert (results_identity(first) == results_identity(second)) is same


def test_dotted_keys_lead_to_values_that_are_no_mappings() -> None:
    values = {"a": {"b": {"c": 1}, "d": [{"e": 2}]}, "f": None, "g": {}}
    assert dict(dotted(values)) == {"a.b.c": 1, "a.d": [{"e": 2}], "f": None}
    assert dict(dotted({"b": 1}, "a.")) == {"a.b": 1}
