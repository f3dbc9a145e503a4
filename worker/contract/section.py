"""What every section of the configuration is: frozen, strict, without unknown keys."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=10**9)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the configuration: frozen, strict about types, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
