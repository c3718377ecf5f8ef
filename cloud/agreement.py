"""How often drafts are right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

FIRST_SHARE, FIRST_TOKENS = 0.7, 8.0  # before anything is known
LIKELY_TOKENS, DOUBT = 24.0, 100.0  # sessions differ as if by so many tokens each; so many compared ones outweigh that
MOST_TOKENS = 1000.0
WINDOW = 768.0
LAST = 64.0
KEEP_LAST = 1.0 - 1.0 / LAST
SURE = 3.0  # standard deviations


class Prior(NamedTuple):
    """What is held of a session's agreement before it is looked at, and how many of its own tokens outweigh that."""

    share: float = FIRST_SHARE
    tokens: float = FIRST_TOKENS


class Agreement:
    """How often a proposed token is the target's own: of a session, beside all sessions of the target.

    Many tokens count, so that chance does not; but where the last ones differ from them by more than chance, the text
    is another one now, and only those count.
    """

    def __init__(self, window: float = WINDOW) -> None:
        """window: proposed tokens that count at most."""
        self._keep = 1.0 - 1.0 / window
        self.right = self.tried = 0.0
        self._last_right = self._last_tried = 0.0

    def add(self, right: int, tried: int) -> None:
        """So many tokens were right of those compared: the right ones and, if there was one, the first wrong one."""
        keep, keep_last = self._keep**tried, KEEP_LAST**tried
        self.right = keep * self.right + right
        self.tried = keep * self.tried + tried
        self._last_right = keep_last * self._last_right + right
        self._last_tried = keep_last * self._last_tried + tried
        if self._differs():
            self.right, self.tried = self._last_right, self._last_tried

    def _differs(self) -> bool:
        """Whether the last tokens are of another kind than all that count."""
        if self._last_tried < 0.5 * LAST or self.tried < 2 * self._last_tried:
            return False
        share = (self.right + 1.0) / (self.tried + 2.0)
        apart = self._last_right / self._last_tried - self.right / self.tried
        return apart * apart * self._last_tried > SURE * SURE * share * (1.0 - share)

    def value(self, prior: Prior) -> float:
        """The share of right ones, with the prior's mixed in."""
        return (self.right + prior.tokens * prior.share) / (self.tried + prior.tokens)


def prior_of(sessions: Sequence[Agreement], usual: float) -> Prior:
    """What sessions have in common: their shares of right tokens differ by chance, and by what is left above that.

    The moments of a beta-binomial distribution (empirical Bayes): the less the sessions differ beyond chance, the more
    each of them is taken for like the others. usual: the share where there are none.
    """
    tried = math.fsum(one.tried for one in sessions)
    share = (math.fsum(one.right for one in sessions) + FIRST_TOKENS * usual) / (tried + FIRST_TOKENS)
    chance = max(share * (1.0 - share), 1e-6)  # variance of one token
    apart = math.fsum((one.right - share * one.tried) ** 2 / one.tried for one in sessions if one.tried)
    counted = sum(one.tried > 0 for one in sessions)
    pairs = tried - math.fsum(one.tried**2 for one in sessions) / tried if tried else 0.0
    beyond = (apart - max(0, counted - 1) * chance + chance * DOUBT / LIKELY_TOKENS) / (pairs + DOUBT)
    return Prior(share, min(MOST_TOKENS, chance / beyond) if beyond > 0 else MOST_TOKENS)
