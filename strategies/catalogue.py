"""The table of all methods, by the name that an experiment chooses them with."""

from collections.abc import Mapping
from types import MappingProxyType

from strategies import (
    fedavg,
    fedavg_plus,
    fedem,
    knn_per,
    knn_per_protonn,
    local,
    pfedhn,
    scaffold,
)
from strategies.core.method import MethodSpec

METHODS: Mapping[str, MethodSpec] = MappingProxyType(
    {
        "fedavg": fedavg.SPEC,
        "local": local.SPEC,
        "fedavg_plus": fedavg_plus.SPEC,
        "knn_per": knn_per.SPEC,
        "knn_per_protonn": knn_per_protonn.SPEC,
        "scaffold": scaffold.SPEC,
        "fedem": fedem.SPEC,
        "pfedhn": pfedhn.SPEC,
    }
)
"""Read-only: a new method is a new file and a new line here."""
