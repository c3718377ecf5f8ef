"""What the service counts about itself; read by /metrics, `paceline report` and the tests."""

from __future__ import annotations

from paceline.core.percentiles import Window


class Statistics:
    """Counters and bounded windows; written by the service's thread, `snapshot` may be called from any.

    utilization is the share of the time between the first forward and the last that forwards took: 1 means the
    drafter never waited for a target. Drafting ahead fills idle time and counts apart. queue_ms is a Draft's wait
    until its first forward, draft_ms the time from there to its answer; both over the last 1 024 answers.
    """

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.first_work: float | None = None
        self.last_work = 0.0
        self.sessions_peak = 0
        self.live_sessions = 0
        self.queue_ms = Window(1024)
        self.draft_ms = Window(1024)
        self.tokens_drafted = 0
        self.ahead_seconds = 0.0
        self.tokens_ahead = 0  # drafted for rounds that might come
        self.branches = 0  # sent ahead
        self.tokens_read = 0  # catch-up: committed tokens computed in chunks
        self.drafts_received = 0
        self.answers = dict.fromkeys(("ok", "warming", "unknown", "full", "beyond"), 0)

    def worked(self, start: float, end: float) -> None:
        """One forward, from `start` to `end` (seconds on the service's clock)."""
        if self.first_work is None:
            self.first_work = start
        self.busy_seconds += end - start
        self.last_work = end

    def live(self, sessions: int) -> None:
        """How many sessions are held now."""
        self.live_sessions = sessions
        self.sessions_peak = max(self.sessions_peak, sessions)

    @property
    def utilization(self) -> float:
        return self._share(self.busy_seconds)

    def _share(self, seconds: float) -> float:
        """Of the time between the first forward and the last."""
        if self.first_work is None or self.last_work <= self.first_work:
            return 0.0
        return seconds / (self.last_work - self.first_work)

    def snapshot(self) -> dict[str, object]:
        """All figures, ready for JSON."""
        return {
            "utilization": self.utilization,
            "ahead": self._share(self.ahead_seconds),
            "sessions_peak": self.sessions_peak,
            "live_sessions": self.live_sessions,
            "queue_ms": self.queue_ms.summary(),
            "draft_ms": self.draft_ms.summary(),
            "tokens_drafted": self.tokens_drafted,
            "tokens_ahead": self.tokens_ahead,
            "branches": self.branches,
            "tokens_read": self.tokens_read,
            "drafts_received": self.drafts_received,
            "answers": dict(self.answers),
        }
