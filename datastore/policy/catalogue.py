"""All policies, by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol

from datastore.policy.base import Policy
from datastore.policy.class_balanced import ClassBalancedPolicy
from datastore.policy.concatenate import ConcatenatePolicy
from datastore.policy.fifo import FifoPolicy
from datastore.policy.fixed import FixedPolicy
from datastore.policy.reservoir import ReservoirPolicy

PolicyName = Literal["fixed", "fifo", "concatenate", "reservoir", "class_balanced"]


class NamedPolicy(Policy, Protocol):
    """A policy that says what settings it needs.

    Attributes
    ----------
    needs_capacity
        Whether it decides about nothing without a capacity.
    """

    needs_capacity: ClassVar[bool]


POLICIES: Mapping[PolicyName, NamedPolicy] = MappingProxyType(
    {
        "fixed": FixedPolicy(),
        "fifo": FifoPolicy(),
        "concatenate": ConcatenatePolicy(),
        "reservoir": ReservoirPolicy(),
        "class_balanced": ClassBalancedPolicy(),
    }
)
