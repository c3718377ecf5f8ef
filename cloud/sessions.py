"""A session at the target: the truth about one sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from paceline.cloud.agreement import Agreement
from paceline.cloud.ahead import Branches
from paceline.cloud.commit import Output
from paceline.cloud.requests import Request
from paceline.core.model import Span
from paceline.core.rejection import Weights
from paceline.core.sampling import History


class DraftState:
    """What is known of a session's soft state at its drafter, and the draft that came from there.

    acknowledged: committed tokens the drafter said it holds; check: hash of exactly those.
    refused_until: by drafter; for ever once the session is past its context window.
    agreement: how often its draft tokens are right.
    caught_up: the drafter has read what was committed, so waiting for its drafts is worth while.
    """

    def __init__(self) -> None:
        self.drafter: str | None = None
        self.refused_until: dict[str, float] = {}  # drafters that have no place for it, and until when
        self.awaited = False
        self.due = 0.0  # until when
        self.wanted = 0  # tokens that the last round asked for
        self.resent = False  # what the drafter said it lacks, since the last round
        self.took = 0.0  # seconds that the last draft took to come
        self.cut = False  # the last Draft held only a part of what was committed
        self.proposal: Sequence[int] = ()
        self.branches_asked = False  # the last Draft asked for some
        self.saved: float | None = None  # by a branch, of this round's wait for a draft; None: none was asked for
        self.taken = 0  # tokens of a branch that are the proposal now
        self.weights: Sequence[Weights] = ()  # what the proposal was drawn from; none where it is a coupled one
        self.log_probs: Sequence[float] = ()  # of proposed tokens from `log_probs_from` on, if the drafter said it
        self.log_probs_from = 0
        self.agreement = Agreement()
        self.forget()

    def forget(self) -> None:
        """The drafter holds nothing of this session (again)."""
        self.acknowledged = 0
        self.check = 0
        self.caught_up = False
        self.branches = Branches()
        self.unanswered_since: float | None = None
        self.sent_at: dict[int, float] = {}  # version → time, of the last few Drafts

    def answered(self, version: int) -> float | None:
        """When that version was sent, once: no older one is answered after it."""
        sent = self.sent_at.pop(version, None)
        for older in [other for other in self.sent_at if other < version]:
            del self.sent_at[older]
        return sent


class Session:
    """One sequence being decoded. `tokens` is what is committed: the prompt and the output."""

    def __init__(self, id: int, request: Request, token_bytes: Sequence[bytes], span: Span) -> None:
        self.id = id
        self.request = request
        self.tokens = array("I", request.prompt)
        self.output = Output(request, token_bytes)
        self.history = History(request.prompt, len(request.prompt)) if request.sampling.adjusts else None
        self.span = span
        self.kv_length = 0
        self.drafts = DraftState()

    @property
    def limit(self) -> int:
        """The longest this session can become, in tokens."""
        return len(self.request.prompt) + self.request.max_tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Commits tokens. The KV of all but the last is computed; what drafts left behind it is rolled back."""
        self.tokens.extend(tokens)
        self.kv_length = len(self.tokens) - 1
        if self.history is not None:
            self.history.extend(tokens)
