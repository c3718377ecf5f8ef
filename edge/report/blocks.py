"""What the JSON blocks and the numbers of a recording may hold: whatever passes here needs no second look."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from paceline.core.printable import printable

MOST_SECONDS = 1e9  # three decades: of a monotonic clock, and of anything that is timed with it
MOST = 1e15  # of what a sensor shows; bytes of memory are the largest

T = TypeVar("T")


def _shown(value: Any) -> str:
    return printable(value if isinstance(value, str) else str(value))


Words = Annotated[str, AfterValidator(printable)]
Shown = Annotated[str, BeforeValidator(_shown)]
Number = Annotated[float, Field(ge=-MOST, le=MOST, allow_inf_nan=False)]


class _Sensors(BaseModel):
    model_config = ConfigDict(extra="allow")

    sources: list[Words] = []
    absent: dict[Words, Shown] = {}
    power: list[Words] = []


class _Spec(BaseModel):
    """Of a DrafterSpec, what a report shows."""

    model_config = ConfigDict(extra="allow")

    strategy: Words = "draft_model"
    runtime: Words
    model: Words | None = None
    device: Words | None = None


class Info(BaseModel):
    """The first block."""

    model_config = ConfigDict(extra="allow")

    format: Literal[1]
    drafter: Words
    pid: int
    started: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
    clock_zero: Annotated[float, Field(ge=-1e10, le=1e11, allow_inf_nan=False)]
    part: int = 0
    sensors: _Sensors
    drafter_spec: _Spec
    environment: dict[Words, Shown]
    topology: dict[str, Any] = {}


class _Passes(BaseModel):
    model_config = ConfigDict(extra="allow")

    count: Annotated[int, Field(ge=0)]
    mean: Annotated[float, Field(gt=0, lt=MOST_SECONDS, allow_inf_nan=False)]


class _Status(BaseModel):
    """Of a target's status file, what a prediction takes."""

    model_config = ConfigDict(extra="allow")

    role: Literal["target"]
    verify_ms: _Passes | None = None


INFO = TypeAdapter(Info)
STATUS = TypeAdapter(_Status)
PEER = TypeAdapter(list[Words])
SENS = TypeAdapter(dict[Words, Number])
LOST: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(ge=0, le=1 << 53)])


def read(kind: TypeAdapter[T], data: bytes) -> T | None:
    """A block's content; None for one that is damaged."""
    try:
        return kind.validate_python(json.loads(data))
    except (ValueError, RecursionError, ValidationError):
        return None


def read_sample(data: bytes) -> dict[str, float] | None:
    """A sample of the sensors, which has its time."""
    sample = read(SENS, data)
    return sample if sample and 0 <= abs(sample.get("time", MOST)) <= MOST_SECONDS else None


def sound(records: NDArray[Any]) -> NDArray[np.bool_]:
    """[N]: whether each record's times are times."""
    good = np.ones(len(records), np.bool_)
    for name in records.dtype.names or ():
        if records.dtype[name].kind == "f":
            with np.errstate(invalid="ignore"):
                good &= np.abs(records[name]) <= MOST_SECONDS
    return good
