"""The one place where tokens become output: ids, text, log-probabilities and the end are cut together."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.cloud.requests import FinishReason, LogProb, Request


@dataclass
class Committed:
    """What a round really added: `token_ids` is a prefix of the round's tokens."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[LogProb] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Cut(NamedTuple):
    """The tokens of a round that are output, and why they are the last ones, if they are."""

    token_ids: list[int]
    finish_reason: FinishReason | None


class Output:
    """A request's output so far: how many tokens, and the text that may not be shown yet.

    token_bytes: id → bytes, empty for special tokens. Text is held back while it could still become a
    stop string, and while a character's UTF-8 is incomplete.
    """

    def __init__(self, request: Request, token_bytes: Sequence[bytes]) -> None:
        self.request = request
        self.length = 0
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._undecoded: list[int] = []
        self._ready = ""  # text that may be shown
        self._held = ""  # text that may become a stop string
        self._ended = False
        self._stopped = False  # by a stop string: what follows it is not output

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_tokens - self.length

    def commit(self, tokens: Sequence[int], log_probs: Sequence[LogProb] = ()) -> Committed:
        """`cut` and `text` in one step."""
        cut = self.cut(tokens)
        return Committed(cut.token_ids, self.text(), list(log_probs[: len(cut.token_ids)]), cut.finish_reason)

    def cut(self, tokens: Sequence[int]) -> Cut:
        """How many of a round's tokens are output: stop token → stop string → length cap, one at a time.

        The text waits for `text()`, so that the next Draft need not wait for it; only stop strings have to be
        looked for here.
        """
        token_ids = list(tokens[: self.remaining])
        finish: FinishReason | None = None
        if not self.request.stop_token_ids.isdisjoint(token_ids):
            finish = "stop"
            token_ids = token_ids[: 1 + next(i for i, t in enumerate(token_ids) if t in self.request.stop_token_ids)]
        shown = token_ids[:-1] if finish else token_ids  # a stop token has no text
        if self.request.stop:
            for index, token in enumerate(shown):
                if self._decode((token,)):
                    token_ids, finish = token_ids[: index + 1], "stop"
                    self._stopped = True
                    break
        else:
            self._undecoded += shown
        self.length += len(token_ids)
        if finish is None and self.remaining <= 0:
            finish = "length"
        self._ended = finish is not None
        return Cut(token_ids, finish)

    def text(self) -> str:
        """The text that may be shown since the last call."""
        if self._undecoded:
            self._decode(self._undecoded)
            self._undecoded = []
        if self._ended and not self._stopped:
            text, _ = self._release(self._decoder.decode(b"", True))  # an incomplete character becomes U+FFFD
            self._ready += text + self._held
            self._held = ""
        text, self._ready = self._ready, ""
        return text

    def _decode(self, tokens: Sequence[int]) -> bool:
        """Adds the tokens' text to what may be shown; True when a stop string ended it."""
        data = b"".join([self._token_bytes[token] for token in tokens if token < len(self._token_bytes)])
        text, stopped = self._release(self._decoder.decode(data))
        self._ready += text
        return stopped

    def _release(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string ended it (it is cut off)."""
        if not self.request.stop:
            return text, False
        buffer = self._held + text
        found = [at for at in (buffer.find(stop) for stop in self.request.stop) if at >= 0]
        if found:
            self._held = ""
            return buffer[: min(found)], True
        keep = max(_overlap(buffer, stop) for stop in self.request.stop)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` (and is not all of it)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
