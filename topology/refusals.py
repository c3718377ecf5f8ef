"""Refusals of strangers are told once for each host and code, so that nobody can fill the log."""

from __future__ import annotations

import logging

MAX_TOLD = 1024


class RefusalLog:
    """What has been told already; it forgets everything when it is full."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[tuple[str, str]] = set()

    def tell(self, address: str, code: str, reason: str) -> None:
        """address: host:port of who is refused."""
        told = (address.rpartition(":")[0], code)
        if told in self._told:
            return
        if len(self._told) >= MAX_TOLD:
            self._told.clear()
        self._told.add(told)
        fields = {"event": "refused", "address": address, "code": code, "reason": reason}
        self._log.warning("refused %s: %s: %s", address, code, reason, extra=fields)
