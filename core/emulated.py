"""A toy language, so that all the real code runs where there is no model: the next token is a hash of the context.

Rows of logits depend on every token before them, so a wrong rollback, a stale KV row or a mixed-up session
changes the text at once. A drafter's copy of the language agrees with the target's with a set probability.
Everything measured with it is to be labelled `emulated`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.clock import Clock, RealClock
from paceline.core.errors import PacelineError
from paceline.core.model import Segment, Span
from paceline.core.profile import StepTimes
from paceline.core.sampling import GOLDEN, MASK64, gumbel, mix, signed
from paceline.core.vocabulary import Vocabulary

MOST_LATE = 1e-3  # seconds that the next pass makes up for


@dataclass(frozen=True)
class ToyLanguage:
    """What the next token is.

    agreement: probability that the drafter's likeliest token is the target's (1 for a target).
    second_choice: probability that its second choice is right where the first is wrong.
    spread: texts differ: the agreement of each lies anywhere in agreement ± spread, as its first token has it. The
    likeliest token then has just that probability in the drafter's logits, so what it says of its drafts is true.
    """

    vocabulary_size: int = 257
    seed: int = 0
    agreement: float = 1.0
    second_choice: float = 0.4
    spread: float = 0.0

    def next_state(self, state: int, token: int) -> int:
        """The context hash after one more token; 0 before the first."""
        return mix((state ^ ((token + 1) * GOLDEN)) & MASK64)

    def agreement_of(self, text: int) -> float:
        """Of the text whose first token leads to that state."""
        if self.spread == 0.0:
            return self.agreement
        share = self.agreement + self.spread * (2.0 * (mix(text ^ 0x7E57) >> 11) * 2.0**-53 - 1.0)
        return min(max(share, 2.0 / self.vocabulary_size), 1.0 - 1e-6)

    def rows(self, states: Sequence[int], texts: Sequence[int] | None = None) -> np.ndarray[Any, Any]:
        """float64 logits [len(states), vocabulary_size]. texts: the state after each text's first token; 0 without."""
        keys = np.array([signed(mix(state ^ self.seed)) for state in states], np.int64)[:, None]
        logits: np.ndarray[Any, Any] = 2.0 * gumbel(keys, np.arange(self.vocabulary_size)[None, :])
        if self.agreement < 1.0:
            for row, (state, text) in enumerate(zip(states, texts or [0] * len(states), strict=True)):
                agreement = self.agreement_of(text)
                self._disagree(logits[row], mix(state ^ 0x5DEECE66D), agreement)
                if self.spread:
                    _state(logits[row], agreement)
        return logits

    def _disagree(self, row: np.ndarray[Any, Any], draw: int, agreement: float) -> None:
        if (draw >> 11) * 2.0**-53 < agreement:
            return
        best = int(row.argmax())
        value = row[best]
        row[best] = -np.inf
        second = int(row.argmax())
        if (mix(draw) >> 11) * 2.0**-53 < self.second_choice:
            row[best], row[second] = row[second], value
        else:
            row[best] = row.min(where=np.isfinite(row), initial=0.0) - 1.0
            row[second] = value


def _state(row: np.ndarray[Any, Any], share: float) -> None:
    """In place: the likeliest token gets that probability, the others the rest in about equal parts, in their order."""
    best = int(row.argmax())
    row *= 0.01
    row[best] = -np.inf
    row += np.log(1.0 - share) - np.log(np.exp(row).sum())
    row[best] = np.log(share)


@dataclass(frozen=True)
class Pace:
    """How long one forward takes, in milliseconds.

    forward_ms: a pass, over the sequences in it. tokens: a pass, over all tokens in it; the two add up.
    token_ms: more for each token.
    """

    forward_ms: float | StepTimes = 0.0
    token_ms: float = 0.0
    tokens: StepTimes | None = None

    def seconds(self, tokens: int, sequences: int = 1) -> float:
        """Of one pass over so many tokens of so many sequences."""
        pass_ms = self.forward_ms.ms(sequences) if isinstance(self.forward_ms, StepTimes) else self.forward_ms
        if self.tokens is not None:
            pass_ms += self.tokens.ms(tokens)
        return (pass_ms + self.token_ms * tokens) / 1000.0


class ToyModel:
    """A `PackedModel` of the toy language; a span's context hashes stand for its KV."""

    def __init__(
        self,
        language: ToyLanguage,
        *,
        max_context: int = 4096,
        kv_slots: int = 1 << 17,
        pace: Pace | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = "emulated"
        self.language = language
        self.vocabulary_size = language.vocabulary_size
        self.max_context = max_context
        self.kv_slots = kv_slots
        self._pace = pace or Pace()
        self._clock = clock or RealClock()
        self._keys = itertools.count(1)
        self._used = 0
        self._late = 0.0  # seconds that the last pass took too long: sleeping is never exact
        self._states: dict[int, list[int]] = {}

    def allocate(self, length: int) -> Span | None:
        if length > self.kv_slots:
            raise PacelineError(f"a session of {length} tokens is more than the whole arena of {self.kv_slots} slots")
        if self._used + length > self.kv_slots:
            return None
        span = Span(next(self._keys), self._used, length)
        self._used += length
        self._states[span.key] = [0]
        return span

    def free(self, span: Span) -> None:
        del self._states[span.key]
        self._used -= span.size

    def copy(self, source: Span, target: Span, start: int, stop: int) -> None:
        states = self._states[target.key]
        if start >= len(states) or stop >= len(self._states[source.key]) or stop > target.size:
            raise PacelineError(f"tokens {start}…{stop} of a span do not continue one that holds {len(states) - 1}")
        states[start + 1 :] = self._states[source.key][start + 1 : stop + 1]

    def forward(self, segments: Sequence[Segment]) -> np.ndarray[Any, Any]:
        started = self._clock.now()
        wanted: list[int] = []
        texts: list[int] = []
        for segment in segments:
            states = self._extend(segment)
            wanted += states
            texts += [self._states[segment.span.key][1]] * len(states)
        logits = self.language.rows(wanted, texts) if wanted else np.zeros((0, self.vocabulary_size))
        due = started - self._late + self._pace.seconds(sum(len(segment.tokens) for segment in segments), len(segments))
        remaining = due - self._clock.now()
        if remaining > 0:
            self._clock.sleep(remaining)
        self._late = min(max(0.0, self._clock.now() - due), MOST_LATE)
        return logits

    def _extend(self, segment: Segment) -> list[int]:
        states = self._states[segment.span.key]
        if segment.start >= len(states) or segment.start + len(segment.tokens) > segment.span.size:
            raise PacelineError(
                f"tokens {segment.start}…{segment.start + len(segment.tokens)} do not continue a span that holds "
                f"{len(states) - 1} of {segment.span.size}"
            )
        del states[segment.start + 1 :]
        for token in segment.tokens:
            states.append(self.language.next_state(states[-1], token))
        return states[len(states) - segment.rows :] if segment.rows else []


def toy_vocabulary(size: int) -> Vocabulary:
    """A tokenizer for the toy language: ids 0..255 are bytes, what lies above has names of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet[:size] + [f"<toy_{index}>" for index in range(256, size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer, bos=0)
