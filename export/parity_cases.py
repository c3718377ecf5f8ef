"""What a bundle is put through before it counts as done: the steps that a drafter will ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROWS = 4  # that both sides of a comparison need
CHUNK = 256  # tokens of a prompt that the drafter reads in one step
PROMPT = 24


class Feed(NamedTuple):
    """New tokens of one row: they go to positions `start …`, and the candidates after tokens[asked] are wanted."""

    row: int
    start: int
    tokens: Sequence[int]
    asked: int

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Step(NamedTuple):
    """One forward over neighbouring rows. case: what it is an instance of, for the report."""

    case: str
    feeds: Sequence[Feed]

    def __str__(self) -> str:
        pasts, counts = [f.start for f in self.feeds], [len(f.tokens) for f in self.feeds]
        return f"`{self.case}` (past_lengths {pasts}, new tokens {counts}, logit_idx {[f.asked for f in self.feeds]})"


def steps(text: Sequence[int], *, rows: int, max_context: int, multi_token_batch: bool) -> Iterator[Step]:
    """Every case in turn; row r's past is what the steps before wrote there. text: token ids, as many as there are.

    multi_token_batch: whether a batch of several rows may take several tokens each.
    """
    prompt = min(PROMPT, max_context // 2)

    def tokens(start: int, count: int, shift: int = 0) -> list[int]:
        return [text[(start + shift + i) % len(text)] for i in range(count)]

    def feed(row: int, start: int, count: int, asked: int | None = None, shift: int = 0) -> Feed:
        return Feed(row, start, tokens(start, count, shift + 31 * row), count - 1 if asked is None else asked)

    yield Step("past 0, one token", [feed(0, 0, 1)])
    yield Step("one token after a past", [feed(0, 1, 1)])
    yield Step("several tokens after a past", [feed(0, 2, prompt - 2)])
    yield Step("past 0, several tokens", [feed(0, 0, prompt, shift=7)])
    yield Step("an earlier token asked for", [feed(0, prompt, 4, asked=1)])
    lengths = [max(1, prompt - 5 * row) for row in range(rows)]
    for row, length in enumerate(lengths):
        yield Step("a row of its own", [feed(row, 0, length)])
    for turn in range(2):
        yield Step("ragged batch, one token", [feed(row, lengths[row] + turn, 1) for row in range(rows)])
    lengths = [length + 2 for length in lengths]
    yield Step("part of the rows", [feed(row, lengths[row], 1) for row in range(1, rows)])
    back = [max(0, length - 3 - row) for row, length in enumerate(lengths)]
    yield Step("rollback and rewrite, one token", [feed(row, back[row], 1, shift=11) for row in range(rows)])
    yield Step("rollback and rewrite, several tokens", [feed(rows - 1, back[rows - 1] // 2, 3, shift=13)])
    if multi_token_batch:
        back = [length + 1 for length in back]
        counts = [1 + 2 * row for row in range(rows)]
        ragged = [feed(row, back[row], counts[row], asked=counts[row] // 2) for row in range(rows)]
        yield Step("ragged batch, several tokens", ragged)
        back[rows - 1] = 0
        yield Step("ragged batch, one at past 0", [feed(row, back[row], 2, shift=17) for row in range(rows)])
    for start in range(0, max_context, CHUNK):
        yield Step("long context", [feed(0, start, min(CHUNK, max_context - start), shift=3)])
    yield Step("long context, last position again", [feed(0, max_context - 1, 1, shift=5)])
