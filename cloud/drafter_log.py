"""What a target's log says of its drafters beside their links: who is suspect, and which sessions leave whom."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from paceline.cloud.drafters import DrafterState

log = logging.getLogger(__name__)

QUIET_SECONDS = 30.0  # a drafter that wavers, or that is full now and then, is told of so often at most


class DrafterLog:
    """One line a drafter and event, not one a session. Runs on the engine's thread; cheap when nothing has changed.

    target: whose log it is, as several targets may run in one process; "" where it has no name.
    """

    def __init__(self, target: str = "") -> None:
        self._of = f"{target}: " if target else ""
        self._suspect: set[str] = set()  # as was last told
        self._left: Counter[str] = Counter()  # sessions that moved elsewhere and were not told yet
        self._quiet_until: dict[tuple[str, str], float] = {}  # (event, drafter)

    def left(self, drafter: str) -> None:
        """A session has moved to another drafter."""
        self._left[drafter] += 1

    def tell(self, drafters: Mapping[str, DrafterState], now: float) -> None:
        """Logs what has changed; what comes too soon after the last line is told by a later call."""
        for name, drafter in drafters.items():
            if drafter.suspect and name not in self._suspect and self._may("drafter_suspect", name, now):
                self._suspect.add(name)
                words = "%sdrafter %s is suspect: its drafts come too late; nobody waits for them until one is in time"
                log.warning(words, self._of, name, extra={"event": "drafter_suspect", "drafter": name})
            elif not drafter.suspect and name in self._suspect:
                self._suspect.remove(name)
                extra = {"event": "drafter_trusted", "drafter": name}
                log.info("%sdrafter %s is trusted again", self._of, name, extra=extra)
        for name in [name for name in self._left if self._may("sessions_moved", name, now)]:
            count = self._left.pop(name)
            words = "1 session moves" if count == 1 else f"{count} sessions move"
            fields = {"event": "sessions_moved", "drafter": name, "sessions": count}
            log.info("%s%s from %s to others", self._of, words, name, extra=fields)

    def _may(self, event: str, drafter: str, now: float) -> bool:
        if now < self._quiet_until.get((event, drafter), now):
            return False
        self._quiet_until[event, drafter] = now + QUIET_SECONDS
        return True
