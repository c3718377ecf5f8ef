"""The one place where tokens become output: ids, text, log-probabilities and the end are cut together."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cloud.requests import FinishReason, LogProb, Request


@dataclass
class Committed:
    """What a round really added: `token_ids` is a prefix of the round's tokens."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[LogProb] = field(default_factory=list)
    finish_reason: FinishReason | None = None


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
        self._held = ""

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_tokens - self.length

    def commit(self, tokens: Sequence[int], log_probs: Sequence[LogProb] = ()) -> Committed:
        """Walks a round's tokens one at a time: stop token → stop string → length cap."""
        done = Committed()
        for index, token in enumerate(tokens):
            self.length += 1
            done.token_ids.append(token)
            if index < len(log_probs):
                done.log_probs.append(log_probs[index])
            if token in self.request.stop_token_ids:
                done.finish_reason = "stop"
            else:
                piece = self._token_bytes[token] if token < len(self._token_bytes) else b""
                text, stopped = self._release(self._decoder.decode(piece))
                done.text += text
                if stopped:
                    done.finish_reason = "stop"
                    return done
                if self.length >= self.request.max_tokens:
                    done.finish_reason = "length"
            if done.finish_reason:
                done.text += self._flush()
                return done
        return done

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

    def _flush(self) -> str:
        """What was held back, at the end; an incomplete character becomes U+FFFD."""
        text, _ = self._release(self._decoder.decode(b"", True))
        text, self._held = text + self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` (and is not all of it)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
