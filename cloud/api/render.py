"""Completions as OpenAI's JSON, written from pieces: a chunk costs microseconds of the engine's interpreter lock."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.cloud.api.schema import CompletionRequest
from paceline.cloud.api.service import Tokens
from paceline.cloud.requests import Delta, LogProb

LOWEST_LOG_PROB = -9999.0  # JSON has no infinity
encode = msgspec.json.encode


class Choice:
    """One choice's output so far: what a response needs beyond the deltas themselves."""

    def __init__(self, vocabulary: Tokens) -> None:
        self.tokens = 0
        self._token_bytes = vocabulary.token_bytes
        self._special = vocabulary.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def log_probs(self, log_probs: Sequence[LogProb]) -> dict[str, Any]:
        """OpenAI's logprobs object for some tokens; text_offset counts characters of the output."""
        offsets, top = [], []
        for entry in log_probs:
            offsets.append(self._offset)
            if entry.token not in self._special:  # special tokens have a name and show no text
                self._offset += len(self._decoder.decode(self._bytes(entry.token)))
            likeliest = {self._name(token): max(value, LOWEST_LOG_PROB) for token, value in entry.top}
            likeliest.setdefault(self._name(entry.token), max(entry.value, LOWEST_LOG_PROB))
            top.append(likeliest)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(entry.value, LOWEST_LOG_PROB) for entry in log_probs],
            "tokens": [self._name(entry.token) for entry in log_probs],
            "top_logprobs": top,
        }

    def _name(self, token: int) -> str:
        """A token's text; bytes that are none are spelled as OpenAI does, so that names stay distinct."""
        data = self._bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token: int) -> bytes:
        return self._token_bytes[token] if token < len(self._token_bytes) else b""


class Renderer:
    """Writes the response of one call, streamed or whole."""

    def __init__(
        self, call: CompletionRequest, id: str, model: str, created: int, prompt: Sequence[int], vocabulary: Tokens
    ) -> None:
        self.choices = [Choice(vocabulary) for _ in range(call.n)]
        self._call = call
        self._prompt = prompt
        self._started: set[int] = set()
        head = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._head = encode(head)[:-1]
        self._usage_follows = call.stream_options is not None and call.stream_options.include_usage
        self._tail = b'],"usage":null}\n\n' if self._usage_follows else b"]}\n\n"

    def event(self, index: int, delta: Delta) -> bytes:
        """One server-sent event; nothing when a round added nothing that the client asked for."""
        self.choices[index].tokens += len(delta.token_ids)
        wanted = delta.text or delta.finish_reason or self._call.return_token_ids or delta.log_probs
        if not wanted:
            return b""
        return b'data: %s,"choices":[%s%s' % (self._head, self._choice(index, delta), self._tail)

    def end(self) -> bytes:
        """The stream's last events."""
        if not self._usage_follows:
            return b"data: [DONE]\n\n"
        return b'data: %s,"choices":[],"usage":%s}\n\ndata: [DONE]\n\n' % (self._head, self._usage())

    def whole(self, outputs: Sequence[Delta]) -> bytes:
        """The response without streaming; outputs[i] is all of choice i."""
        for choice, output in zip(self.choices, outputs, strict=True):
            choice.tokens = len(output.token_ids)
        choices = b",".join(self._choice(index, output) for index, output in enumerate(outputs))
        return b'%s,"choices":[%s],"usage":%s}' % (self._head, choices, self._usage())

    def _choice(self, index: int, delta: Delta) -> bytes:
        log_probs = b"null"
        if self._call.logprobs is not None:
            log_probs = encode(self.choices[index].log_probs(delta.log_probs))
        ids = b""
        if self._call.return_token_ids:
            ids = b',"token_ids":%s' % encode(delta.token_ids)
            if index not in self._started:  # with a choice's first chunk only, as vLLM does
                self._started.add(index)
                ids += b',"prompt_token_ids":%s' % encode(self._prompt)
        return b'{"index":%d,"text":%s,"logprobs":%s,"finish_reason":%s%s}' % (
            index,
            encode(delta.text),
            log_probs,
            encode(delta.finish_reason),
            ids,
        )

    def _usage(self) -> bytes:
        completion = sum(choice.tokens for choice in self.choices)
        prompt = len(self._prompt)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return encode(usage)
