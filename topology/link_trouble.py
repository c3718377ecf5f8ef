"""Why a link is down, told so that an unplugged cable does not fill the log: each reason once, then reminders."""

from __future__ import annotations

import logging

REMIND_SECONDS = 600.0
MAX_REASONS = 8  # a drafter can answer with words of its own; the reminders go on


class LinkTrouble:
    """What was found since the link was last up. `reason`: the last one, or None."""

    def __init__(self, log: logging.Logger, drafter: str | None, address: str) -> None:
        self.reason: str | None = None
        self._log = log
        self._where = f"drafter {drafter} at {address}" if drafter is not None else f"the drafter at {address}"
        self._fields = {"event": "link_down", "drafter": drafter, "address": address}
        self._told: set[str] = set()
        self._since: float | None = None
        self._remind_at = 0.0

    def found(self, reason: str, now: float) -> None:
        """An attempt has failed, or the link was lost. now: seconds on any steady clock."""
        self.reason = reason
        if self._since is None:
            self._since, self._remind_at = now, now + REMIND_SECONDS
        fields = {**self._fields, "reason": reason}
        if reason not in self._told and len(self._told) < MAX_REASONS:
            self._told.add(reason)
            self._log.warning("no link to %s: %s", self._where, reason, extra=fields)
        elif now >= self._remind_at:
            minutes = (now - self._since) / 60
            self._remind_at = now + REMIND_SECONDS
            self._log.warning("still no link to %s after %.0f min (%s)", self._where, minutes, reason, extra=fields)

    def over(self) -> None:
        """The link is up and has lasted: what is found from now on is told afresh."""
        self.reason = self._since = None
        self._told.clear()
