"""How much longer rounds take than the cost model says, for each setting, as measured.

The model knows nothing of lanes that keep meeting at the drafter or at the target: which settings suffer from that only
shows when they are tried. One that does worse than expected is so left for others that might do better. The more
settings turn out alike, the more the rest is expected to be like them, so not all of them are tried.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from paceline.core.measured import Average

WINDOW = 4  # measurements
LEAST, MOST = 0.8, 1.5
FORGOTTEN = 60.0  # seconds after which what is not measured any more counts a third
CURIOSITY = 0.02  # a number of lanes that was never tried may look so much worse and is tried all the same
DOUBT = 3.0  # the model itself counts as much as so many measured settings


class Setting(NamedTuple):
    """What a round's time depends on, beside the sessions. Draft length 0 is plain decoding, in one lane."""

    lanes: int
    draft_length: int


class _Slip:
    """Of one setting: T measured over T expected, and when."""

    def __init__(self) -> None:
        self.ratio = Average(WINDOW)
        self.at = 0.0


class Slips:
    """A stretch of rounds is compared with the model if nothing else happened in it, and not the first one in a new
    setting or with other sessions: they move among lanes then."""

    def __init__(self) -> None:
        self._slips: dict[Setting, _Slip] = {}
        self._stretch: tuple[Setting, int] | None = None  # what held in the last one
        self._since = self._now = 0.0
        self._served = 0
        self._clean = True
        self._usual = 1.0  # of settings that were not tried
        self._lanes_tried: set[int] = set()

    def round(self, sessions: int) -> None:
        """A lane's pass over so many sessions is done."""
        self._served += sessions

    def disturbed(self) -> None:
        """Something that is not in the model took time."""
        self._clean = False

    def compare(self, setting: Setting, sessions: int, expected: float, now: float) -> None:
        """A stretch ends. expected: T of a round in this setting, in seconds."""
        comparable = self._clean and self._served > 0 and now > self._since
        if comparable and (setting, sessions) == self._stretch:
            slip = self._slips.setdefault(setting, _Slip())
            seconds = (now - self._since) * sessions / self._served
            slip.ratio.add(min(max(seconds / expected, LEAST), MOST))
            slip.at = now
            self._lanes_tried.add(setting.lanes)
        self._stretch = setting, sessions
        self._since, self._now, self._served, self._clean = now, now, 0, True
        self._usual = self._of_untried()

    def of(self, setting: Setting) -> float:
        """By what T of the model is to be multiplied."""
        slip = self._slips.get(setting)
        usual = self._usual if setting.draft_length else 1.0  # nobody is met in plain decoding
        if setting.draft_length and setting.lanes not in self._lanes_tried:
            usual -= CURIOSITY
        return usual + (slip.ratio.value - usual) * self._weight(slip) if slip else usual

    def _of_untried(self) -> float:
        tried = [slip for setting, slip in self._slips.items() if setting.draft_length]
        weights = [self._weight(slip) for slip in tried]
        excess = math.fsum((slip.ratio.value - 1.0) * weight for slip, weight in zip(tried, weights, strict=True))
        return 1.0 + excess / (math.fsum(weights) + DOUBT)

    def _weight(self, slip: _Slip) -> float:
        return math.exp((slip.at - self._now) / FORGOTTEN)
