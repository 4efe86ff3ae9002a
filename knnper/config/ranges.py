"""Number types with their useful ranges, for the fields of settings."""

from typing import Annotated

from pydantic import Field

LARGEST_COUNT = 2**53
"""No client has more examples: up to here, a float holds every integer."""

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]  # [0, 1]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]  # (0, 1]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]  # [0, 1)
