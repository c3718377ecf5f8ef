"""Between the API's loop and the engine's thread: a call becomes requests, their deltas become a stream."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any, Protocol

from paceline.cloud.api.dispatch import Dispatch, Mailbox
from paceline.cloud.api.errors import ApiError, bad_parameter, busy, shutting_down
from paceline.cloud.api.schema import CompletionRequest
from paceline.cloud.engine import Engine
from paceline.cloud.events import Cancel, Drain, Submit
from paceline.cloud.requests import Delta, Request
from paceline.core.sampling import Sampling, choice_seed

CLOSING = "the target is shutting down"
LONG_TEXT = 16_384  # characters; longer prompts are encoded beside the loop


class Tokens(Protocol):
    """What the API needs of a vocabulary (see core.vocabulary.Vocabulary)."""

    @property
    def token_bytes(self) -> Sequence[bytes]: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    @property
    def eos_ids(self) -> Collection[int]: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...


class Completion:
    """A call in progress: n requests with one prompt. Iterate over `deltas`; `cancel` frees what still runs."""

    def __init__(self, id: str, requests: list[Request], service: CompletionService) -> None:
        self.id = id
        self.requests = requests
        self.prompt = requests[0].prompt
        self._service = service
        self._index = {request.id: index for index, request in enumerate(requests)}
        self._mailbox = Mailbox()

    async def deltas(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """What arrived, as (choice, delta), until every choice has ended. Leaving early cancels the rest."""
        left = len(self.requests)
        try:
            while left:
                batch = [(self._index[delta.request_id], delta) for delta in await self._mailbox.take()]
                left -= sum(delta.finish_reason is not None for _, delta in batch)
                yield batch
        finally:
            self.cancel()

    def submit(self, dispatch: Dispatch, engine: Engine) -> None:
        """Hands the requests to the engine."""
        for request in self.requests:
            dispatch.add(request.id, self._mailbox)
            engine.inbox.put(Submit(request))

    def cancel(self) -> None:
        """The client is gone: both ends free the sessions within a round. Does nothing after the end."""
        for request in self.requests:
            if self._service.forget(request.id):
                self._mailbox.put(Delta(request.id, finish_reason="cancelled"))


class CompletionService:
    """Takes calls for one engine.

    dispatch: where that engine publishes. max_queued: requests that may wait beyond the engine's sessions
    before new ones are refused with 503. max_context: tokens of prompt and output together.
    """

    def __init__(self, engine: Engine, vocabulary: Tokens, dispatch: Dispatch, *, max_queued: int = 128) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.max_queued = max_queued
        self.max_context = min(engine.model.max_context, engine.model.kv_slots)
        self.longest = max(map(len, vocabulary.token_bytes), default=1)  # bytes of a token
        self.link_trouble: Callable[[], dict[str, str]] = dict  # from who holds the links: drafter → why it is down
        self._dispatch = dispatch
        self._closed = False

    async def start(self, call: CompletionRequest) -> Completion:
        """Submits a call. Raises ApiError when it can not be served, now or ever; nothing is left behind then."""
        prompt = await self._prompt(call)
        total = len(prompt) + call.max_tokens
        if total > self.max_context:
            message = (
                f"prompt has {len(prompt)} tokens and max_tokens asks for {call.max_tokens} more: {total} exceed "
                f"this target's context of {self.max_context}"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        requests = self._requests(call, prompt)
        self._admit(call.n)
        self._dispatch.bind(asyncio.get_running_loop())
        completion = Completion(requests[0].call, requests, self)
        completion.submit(self._dispatch, self.engine)
        if self.engine.failure is not None:  # it may have failed between the check and the last Submit
            completion.cancel()
            raise self._failed()
        return completion

    def forget(self, request_id: str) -> bool:
        """Cancels a request unless it has ended."""
        if not self._dispatch.remove(request_id):
            return False
        self.engine.inbox.put(Cancel(request_id))
        return True

    @property
    def open_requests(self) -> int:
        """That have not ended; those that wait for room are among them."""
        return len(self._dispatch.open)

    async def drain(self) -> None:
        """Refuses new calls and those that have not begun, with HTTP 503; returns when the others have ended.

        A call in the queue gains nothing by waiting here: another target can begin it now, and time is short.
        """
        self._closed = True
        self.engine.inbox.put(Drain(CLOSING))
        await self._dispatch.idle.wait()

    def close(self) -> None:
        """Before the engine stops: refuses new calls and ends the open ones with an error. On the loop's thread."""
        self._closed = True
        open_ids = self._dispatch.open
        self._dispatch.deliver([Delta(id, finish_reason="error", error=CLOSING, leaving=True) for id in open_ids])
        for id in open_ids:
            self.engine.inbox.put(Cancel(id))

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether calls can be served, and what an operator wants to see."""
        failure = self.engine.failure
        facts: dict[str, Any] = {
            "status": "ok" if failure is None and not self._closed else "failed" if failure else "closing",
            "live_sessions": self.engine.live_sessions,
            "queued": self.engine.queued,
            "drafters": {
                name: "up" if drafter.up else "down" for name, drafter in self.engine.drafting.drafters.items()
            },
            "sessions_at": {name: len(self.engine.drafting.live(name)) for name in self.engine.drafting.drafters},
            "suspect": [name for name, drafter in self.engine.drafting.drafters.items() if drafter.suspect],
            "link_trouble": self.link_trouble(),
        }
        if failure is not None:
            facts["error"] = str(failure)
        return facts["status"] == "ok", facts

    def _admit(self, n: int) -> None:
        if self._closed:
            raise shutting_down(CLOSING)
        if self.engine.failure is not None:
            raise self._failed()
        room = self.engine.config.max_sessions + self.max_queued
        if n > room:
            raise bad_parameter("n", f"must be at most {room}: what this target runs and queues together")
        opened = len(self._dispatch.open)
        if opened + n > room or self.engine.queued > self.max_queued:
            raise busy(f"{opened} requests are running or queued and {room} is the most this target takes; try again")

    def _failed(self) -> ApiError:
        return ApiError(503, f"the target's engine has stopped: {self.engine.failure}", code="engine_failed")

    async def _prompt(self, call: CompletionRequest) -> tuple[int, ...]:
        if not isinstance(call.prompt, str):
            ids = call.prompt
            self._known("prompt", ids)
        elif len(call.prompt) > self.max_context * self.longest:  # encoding it could take gigabytes
            message = f"prompt has {len(call.prompt)} characters, more than {self.max_context} tokens can hold"
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        elif len(call.prompt) > LONG_TEXT:
            ids = await asyncio.to_thread(self.vocabulary.encode, call.prompt)
        else:
            ids = self.vocabulary.encode(call.prompt)
        if not ids:
            if self.vocabulary.bos is None:
                raise bad_parameter("prompt", "must not be empty: this model has no token that begins a text")
            ids = [self.vocabulary.bos]
        return tuple(ids)

    def _known(self, param: str, ids: Sequence[int]) -> None:
        largest = max(ids, default=0)
        if largest >= self.vocabulary.size:
            raise bad_parameter(param, f"holds token id {largest}, but the vocabulary ends at {self.vocabulary.size}")

    def _requests(self, call: CompletionRequest, prompt: tuple[int, ...]) -> list[Request]:
        bias = {int(token): value for token, value in call.logit_bias.items()}
        self._known("logit_bias", list(bias))
        self._known("stop_token_ids", call.stop_token_ids)
        seed = secrets.randbits(64) if call.seed is None else call.seed
        ends = frozenset() if call.ignore_eos else frozenset(self.vocabulary.eos_ids)
        id = f"cmpl-{secrets.token_hex(12)}"
        return [
            Request(
                id=f"{id}-{index}",
                prompt=prompt,
                sampling=Sampling(
                    seed=choice_seed(seed, index),
                    temperature=call.temperature,
                    top_p=call.top_p,
                    top_k=max(call.top_k, 0),
                    min_p=call.min_p,
                    presence_penalty=call.presence_penalty,
                    frequency_penalty=call.frequency_penalty,
                    repetition_penalty=call.repetition_penalty,
                    logit_bias=bias,
                ),
                max_tokens=call.max_tokens,
                stop=tuple(call.stop),
                stop_token_ids=ends | frozenset(call.stop_token_ids),
                log_probs=call.logprobs,
            )
            for index in range(call.n)
        ]
