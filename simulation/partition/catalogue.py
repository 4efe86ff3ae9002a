"""All partitions that an experiment can name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from knnper.data.examples import Dataset
from knnper.seeding import RandomKey
from knnper.simulation.partition.assignment import Assignment, PartitionSettings
from knnper.simulation.partition.dirichlet import DirichletSettings, dirichlet
from knnper.simulation.partition.iid import IidSettings, NaturalSettings, iid, natural
from knnper.simulation.partition.pachinko import PachinkoSettings, pachinko
from knnper.simulation.partition.pathological import PathologicalSettings, pathological
from knnper.simulation.partition.pflbed import PflbedSettings, pflbed


@dataclass(frozen=True)
class PartitionSpec:
    """A partition that can be chosen by name.

    Attributes
    ----------
    title, summary
        For people.
    settings_type
        The dataclass of its settings.
    split
        Takes the data set, an instance of ``settings_type`` and a key.
    """

    title: str
    summary: str
    settings_type: type[PartitionSettings]
    split: Callable[[Dataset, Any, RandomKey], Assignment]


def _split_iid(data: Dataset, settings: IidSettings, key: RandomKey) -> Assignment:
    return iid(data.train.labels, data.test.labels, settings, key)


def _split_dirichlet(
    data: Dataset, settings: DirichletSettings, key: RandomKey
) -> Assignment:
    return dirichlet(data.train.labels, data.test.labels, settings, key)


def _split_pathological(
    data: Dataset, settings: PathologicalSettings, key: RandomKey
) -> Assignment:
    return pathological(data.train.labels, data.test.labels, settings, key)


def _split_pachinko(
    data: Dataset, settings: PachinkoSettings, key: RandomKey
) -> Assignment:
    labels = (data.train.labels, data.test.labels)
    return pachinko(*labels, data.coarse_of, settings, key)


def _split_natural(
    data: Dataset,
    settings: NaturalSettings,  # noqa: ARG001 - the signature of every split
    key: RandomKey,  # noqa: ARG001 - nothing is random here
) -> Assignment:
    return natural(data.train.client_ids, data.test.client_ids)


PARTITIONS: Mapping[str, PartitionSpec] = MappingProxyType(
    {
        "iid": PartitionSpec(
            "IID",
            "equal random shares",
            IidSettings,
            _split_iid,
        ),
        "dirichlet": PartitionSpec(
            "Dirichlet",
            "each label spread over the clients by a Dirichlet draw (alpha)",
            DirichletSettings,
            _split_dirichlet,
        ),
        "pathological": PartitionSpec(
            "Pathological",
            "each client has samples of exactly classes_per_client labels",
            PathologicalSettings,
            _split_pathological,
        ),
        "pachinko": PartitionSpec(
            "Pachinko",
            "Dirichlet over coarse labels (alpha), then over fine ones (beta)",
            PachinkoSettings,
            _split_pachinko,
        ),
        "natural": PartitionSpec(
            "Natural",
            "the clients that the data set itself names",
            NaturalSettings,
            _split_natural,
        ),
        "pflbed": PartitionSpec(
            "pFLBED",
            "clients of several domains; each is tested on all of its domain",
            PflbedSettings,
            pflbed,
        ),
    }
)
