"""The few expected failures, each with what to do about it.

`UserError` ends a command with exit code 2 and one sentence; the others are handled by whoever
holds the session or the link they concern.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Root of every failure that Paceline raises on purpose."""


class UserError(PacelineError):
    """The user's input is wrong: a file, an option, a port. The message says what to do."""


class UnsupportedModel(UserError):
    """A model that the packed forward cannot run exactly; the message names the family and the reason."""


class OutOfMemory(PacelineError):
    """No room in the KV arena now; the caller queues or answers 503."""


class WireError(PacelineError):
    """Bytes that are no message: malformed, oversized or of an unknown kind."""


class HandshakeRefused(PacelineError):
    """One side refused the other; `code` is the machine's word, the message the person's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class LinkClosed(PacelineError):
    """The other end is gone; the message says how."""
