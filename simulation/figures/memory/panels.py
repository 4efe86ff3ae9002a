"""The figures of the memory by name, in the order of the paper."""

from collections.abc import Mapping
from types import MappingProxyType

from simulation.figures.memory import (
    best_weight,
    capacity,
    hardware,
    kernel_scale,
    neighbors,
    sizes,
)
from simulation.figures.memory.panel import Panel

PANELS: Mapping[str, Panel] = MappingProxyType(
    {
        module.PANEL.name: module.PANEL
        for module in (capacity, sizes, neighbors, kernel_scale, best_weight, hardware)
    }
)
