"""What a target counts; written on the engine's thread, read from any."""

from __future__ import annotations

from typing import Any

from paceline.core.percentiles import Window


class TargetStatistics:
    """Totals since start, and the last times in milliseconds.

    rounds: one for each session and round. fallback_rounds: those among them that went without a draft
    although drafters are configured. acceptance_length: tokens emitted a round, over the rounds with a draft.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.rounds = 0
        self.fallback_rounds = 0
        self.sessions_peak = 0
        self.drafted_rounds = 0
        self.drafted_tokens = 0
        self.emitted_with_draft = 0
        self.verify_ms = Window(2048)
        self.prefill_ms = Window(2048)

    def opened(self, live: int) -> None:
        self.sessions_peak = max(self.sessions_peak, live)

    def forward(self, seconds: float, lane: bool, chunk: bool) -> None:
        """One forward; those with a prompt chunk are kept apart."""
        (self.verify_ms if lane and not chunk else self.prefill_ms).add(seconds * 1000.0)

    def first_token(self) -> None:
        self.tokens += 1

    def round(self, emitted: int, drafted: int, speculates: bool) -> None:
        """One session's share of a round."""
        self.rounds += 1
        self.tokens += emitted
        if drafted:
            self.drafted_rounds += 1
            self.drafted_tokens += drafted
            self.emitted_with_draft += emitted
        elif speculates:
            self.fallback_rounds += 1

    @property
    def acceptance_length(self) -> float:
        return self.emitted_with_draft / self.drafted_rounds if self.drafted_rounds else 1.0

    def snapshot(self) -> dict[str, Any]:
        """For status files and `run`."""
        return {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "fallback_rounds": self.fallback_rounds,
            "drafted_rounds": self.drafted_rounds,
            "drafted_tokens": self.drafted_tokens,
            "acceptance_length": self.acceptance_length,
            "sessions_peak": self.sessions_peak,
            "verify_ms": self.verify_ms.summary(),
            "prefill_ms": self.prefill_ms.summary(),
        }
