"""What an experiment can put on top of a method, by the name it chooses it with."""

from collections.abc import Mapping
from types import MappingProxyType

from strategies import (
    dapper,
    fine_tuning,
    knn_fine_tuned,
    knn_per,
    knn_per_protonn,
    linear_probe,
    mapper_two_stage,
)
from strategies.core.method import AS_IT_IS, NoSettings
from strategies.core.personalizer import PersonalizerSpec

PERSONALIZERS: Mapping[str, PersonalizerSpec] = MappingProxyType(
    {
        AS_IT_IS: PersonalizerSpec(
            title="",
            summary="Clients are served what the method itself gives them.",
            source="the method's own",
            settings_type=NoSettings,
            apply=lambda task, method, settings: method,
            unseen="what the method gives them",
        ),
        "fine_tuning": fine_tuning.ON_TOP,
        "linear_probe": linear_probe.ON_TOP,
        "knn": knn_per.ON_TOP,
        "protonn": knn_per_protonn.ON_TOP,
        "knn_fine_tuned": knn_fine_tuned.ON_TOP,
        "dapper": dapper.ON_TOP,
        "mapper_two_stage": mapper_two_stage.ON_TOP,
    }
)
"""Read-only: a new one is a new file and a new line here."""
