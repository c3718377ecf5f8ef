"""Warnings of nodes that run in this process, each kind told once with how many more there were."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import typer


class _Folding(logging.Handler):
    """Keeps the first message of each kind, and counts the others. A kind is a format string."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.first.setdefault(record.msg, record.getMessage())
        self.counts[record.msg] += 1


@contextmanager
def folded_warnings(about: str) -> Iterator[None]:
    """What Paceline warns of meanwhile comes to stderr at the end, also of what fails. about: begins each line."""
    logger, folding = logging.getLogger("paceline"), _Folding()
    logger.addHandler(folding)
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(folding)
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        for kind, message in folding.first.items():
            more = folding.counts[kind] - 1
            typer.echo(f"{clear}{about}: {message}{f' ({more} more like it)' if more else ''}", err=True)
