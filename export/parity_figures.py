"""What a parity check measures, and how much of it is allowed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from paceline.core.errors import PacelineError
from paceline.edge.runtimes.base import Top
from paceline.export.parity_subjects import Floats


class ParityFailed(PacelineError):
    """A bundle does not compute what its model computes; the message names the step and the first layer."""


class Extent(NamedTuple):
    """How much of a bundle is checked, as its manifest declares it."""

    layers: int
    max_context: int
    multi_token_batch: bool
    precision: str  # a key of TOLERANCES


class Tolerance(NamedTuple):
    """What may differ. kv, logits: largest difference, in units of the standard deviation of what is compared.
    agreement: least share of positions of real text at which both choose the same token."""

    kv: float
    logits: float
    agreement: float


# Several times what the embedded pair, SmolLM2-135M and random models of every family show. A quantised graph was
# compared before it was quantised, with float32's bounds: these are then for its loss alone; single keys have the most.
TOLERANCES = {
    "float64": Tolerance(0.002, 0.002, 0.995),
    "float32": Tolerance(0.002, 0.002, 0.995),
    "float16": Tolerance(0.1, 0.1, 0.97),
    "bfloat16": Tolerance(0.5, 0.5, 0.8),
    "int8": Tolerance(8.0, 3.0, 0.85),
    "int4": Tolerance(16.0, 6.0, 0.6),
}


@dataclass
class Parity:
    """What was measured; `asdict` of it is the manifest's `parity`."""

    reference: str
    subject: str
    tolerance: dict[str, float]
    steps: int = 0
    cases: dict[str, float] = field(default_factory=dict)  # largest difference of a logit, as it is
    kv_difference: float = 0.0  # largest, in standard deviations
    logit_difference: float = 0.0  # largest over cases and text, in standard deviations
    max_difference: float = 0.0  # the same as it is
    text_positions: int = 0
    top1_agreement: float = 0.0  # on real text
    agreement: dict[str, float] = field(default_factory=dict)  # temperature → share of equal coupled choices

    def compare(self, expected: Floats, got: Top) -> tuple[float, float]:
        """One row of logits [vocabulary] with the candidates [64] of the other side.

        Returns the largest difference, and the same in standard deviations of the row; both are kept.
        """
        best = np.sort(expected)[::-1][: len(got.ids)]
        # By token, and by rank: a token that is missing among the candidates shows in the second.
        difference = float(max(np.abs(got.logits - expected[got.ids]).max(), np.abs(got.logits - best).max()))
        relative = difference / max(float(expected.std()), 1e-6)
        self.max_difference = max(self.max_difference, difference)
        self.logit_difference = max(self.logit_difference, relative)
        return difference, relative
