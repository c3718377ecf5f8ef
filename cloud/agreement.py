"""How often drafts are right."""

from __future__ import annotations


class Agreement:
    """How often a proposed token is the target's own: of a session, beside all sessions of the target."""

    def __init__(self, window: float) -> None:
        """window: proposed tokens that count."""
        self._keep = 1.0 - 1.0 / window
        self.right = 0.0
        self.tried = 0.0

    def add(self, right: int, tried: int) -> None:
        """So many tokens were right of those compared: the right ones and, if there was one, the first wrong one."""
        keep = self._keep**tried
        self.right = keep * self.right + right
        self.tried = keep * self.tried + tried

    def value(self, prior: float, weight: float) -> float:
        """The share of right ones, with so many tokens of the prior share mixed in."""
        return (self.right + weight * prior) / (self.tried + weight)
