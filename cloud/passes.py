"""The two halves of an engine's turn: what a forward found, and what that led to."""

from __future__ import annotations

from typing import NamedTuple

from paceline.cloud.commit import Cut
from paceline.cloud.lanes import Lane
from paceline.cloud.sessions import Session
from paceline.cloud.verify import Verified


class Pass(NamedTuple):
    """A forward over a lane (or prompts alone) and what it found."""

    lane: Lane | None
    sessions: list[Session]
    verified: list[Verified]


class Round(NamedTuple):
    """What a forward led to: one cut for each verified session, who ended, and who joined which lane."""

    cuts: list[Cut]
    ended: list[Session]
    joined: list[tuple[Lane, Session]]
