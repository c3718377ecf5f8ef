"""Completions over HTTP: the text is the engine's, streamed or not, whatever runs beside it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from paceline.cloud.requests import Request
from paceline.core.emulated import Pace, toy_vocabulary
from paceline.core.sampling import Sampling, choice_seed

pytestmark = pytest.mark.anyio


def bodies(count: int, max_tokens: int = 40) -> list[dict[str, Any]]:
    """Requests that differ in prompt, temperature and filters."""
    return [
        {
            "prompt": f"line {index}",
            "max_tokens": max_tokens,
            "seed": index,
            "temperature": (0, 0.7, 1.3)[index % 3],
            "top_p": (1.0, 0.9)[index % 2],
            "top_k": (0, 40, -1)[index % 3],
            "presence_penalty": (0.0, 0.5)[index % 2],
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for index in range(count)
    ]


def as_request(vocabulary: Any, body: dict[str, Any], id: str) -> Request:
    """What the API is to make of a body."""
    sampling = Sampling(
        seed=choice_seed(body["seed"], 0),
        temperature=body["temperature"],
        top_p=body["top_p"],
        top_k=max(body["top_k"], 0),
        presence_penalty=body["presence_penalty"],
    )
    return Request(id, tuple(vocabulary.encode(body["prompt"])), sampling, body["max_tokens"])


def joined(events: list[str]) -> tuple[str, list[int], str | None]:
    """Text, token ids and finish reason of a stream with one choice."""
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    text = "".join(choice["text"] for choice in choices)
    return text, [id for choice in choices for id in choice.get("token_ids", [])], choices[-1]["finish_reason"]


async def test_stream_whole_and_engine_agree(running: Any, direct: Any, pieces: Any) -> None:
    """24 calls at once, streamed and whole, give the very tokens and text of the engine alone, cut characters too."""
    asked = bodies(24)
    expected = direct(pieces, [as_request(pieces, body, str(index)) for index, body in enumerate(asked)])
    async with running(pieces) as target:
        streamed = await asyncio.gather(*(target.events(**body) for body in asked))
        whole = await asyncio.gather(*(target.complete(**body) for body in asked))
    split = 0
    for index, (events, response) in enumerate(zip(streamed, whole, strict=True)):
        ids, text = expected[str(index)]
        choice = response["choices"][0]
        assert joined(events) == (text, ids, "length")
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (text, ids, "length")
        assert text == b"".join(pieces.token_bytes[id] for id in ids).decode(errors="replace")
        split += text.count("€")
    assert split > 20


async def test_shape_of_a_whole_response(target: Any, vocabulary: Any) -> None:
    """A response has OpenAI's fields, the prompt's ids when asked for, and a usage that adds up."""
    response = await target.complete(prompt="hi", return_token_ids=True, ignore_eos=True, model="toy", user="me")
    assert response["id"].startswith("cmpl-")
    assert (response["object"], response["model"]) == ("text_completion", "toy")
    assert response["usage"] == {"prompt_tokens": 2, "completion_tokens": 16, "total_tokens": 18}
    choice = response["choices"][0]
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert choice["prompt_token_ids"] == vocabulary.encode("hi")


async def test_prompt_as_ids_text_or_single_list(target: Any, vocabulary: Any) -> None:
    """A prompt in ids, alone in a list or as text is one and the same; an empty one is the token that begins a text."""
    ids = vocabulary.encode("same")
    prompts: list[Any] = ["same", ["same"], ids, [ids]]
    texts = [await target.complete(prompt=prompt, seed=5) for prompt in prompts]
    assert len({text["choices"][0]["text"] for text in texts}) == 1
    empty = [await target.complete(prompt=prompt, seed=5, return_token_ids=True) for prompt in ("", [], [0])]
    assert [one["choices"][0]["prompt_token_ids"] for one in empty] == [[0]] * 3


async def test_usage_at_the_end_of_a_stream(target: Any) -> None:
    """With include_usage every chunk has a null usage and a last one, without choices, the totals."""
    options = {"include_usage": True}
    events = await target.events(prompt="abc", max_tokens=9, ignore_eos=True, stream_options=options, n=2)
    chunks = [json.loads(event) for event in events[:-1]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 18, "total_tokens": 21}


@pytest.mark.parametrize("length", [1, 2, 3])
async def test_stop_string_over_token_bounds(running: Any, pieces: Any, length: int) -> None:
    """A stop string ends both forms before it, also when characters and tokens are split across it."""
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 60, "seed": 3, "temperature": 1.0, "return_token_ids": True}
    async with running(pieces) as target:
        free = (await target.complete(**body))["choices"][0]["text"]
        at = free.index("€", 10)
        stop = free[at : at + length]
        whole = (await target.complete(**body, stop=stop))["choices"][0]
        streamed = joined(await target.events(**body, stop=["never said", stop]))
    assert whole["text"] == free[: free.index(stop)]
    assert whole["finish_reason"] == "stop"
    assert streamed == (whole["text"], whole["token_ids"], "stop")


async def test_end_tokens(target: Any) -> None:
    """An end token stops a text without showing in it, is counted, and ignore_eos or another stop token change that."""
    only_end = {"256": 100.0}
    end = await target.complete(prompt="x", logit_bias=only_end, return_token_ids=True)
    assert end["choices"][0] | {"prompt_token_ids": None} == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "token_ids": [256],
        "prompt_token_ids": None,
    }
    assert end["usage"]["completion_tokens"] == 1
    ignored = await target.complete(prompt="x", logit_bias=only_end, ignore_eos=True, max_tokens=4)
    assert ignored["choices"][0]["finish_reason"] == "length"
    other = await target.complete(prompt="x", logit_bias={"65": 100.0}, stop_token_ids=[65])
    assert (other["choices"][0]["finish_reason"], other["usage"]["completion_tokens"]) == ("stop", 1)


async def test_choices_differ_and_repeat(target: Any) -> None:
    """n choices of one seed differ from each other, come back the same, and choice 0 is that of n = 1."""
    body = {"prompt": "story", "seed": 11, "max_tokens": 30, "ignore_eos": True}
    first, again = await asyncio.gather(*(target.complete(**body, n=4, best_of=4) for _ in range(2)))
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts)) == 4
    assert (await target.complete(**body))["choices"][0]["text"] == texts[0]
    assert first["usage"]["completion_tokens"] == 120


async def test_streamed_choices_are_told_apart(target: Any) -> None:
    """The chunks of several choices carry their index; put together they are the whole response's choices."""
    body = {"prompt": "story", "seed": 12, "max_tokens": 30, "n": 3}
    whole = await target.complete(**body)
    texts = ["", "", ""]
    for event in (await target.events(**body))[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


async def test_without_a_seed_texts_differ(target: Any) -> None:
    """Calls without a seed get fresh ones; at temperature 0 they are the same all the same."""
    free = [await target.complete(prompt="x", max_tokens=30) for _ in range(2)]
    assert free[0]["choices"][0]["text"] != free[1]["choices"][0]["text"]
    greedy = [await target.complete(prompt="x", max_tokens=30, temperature=0) for _ in range(2)]
    assert greedy[0]["choices"][0]["text"] == greedy[1]["choices"][0]["text"]


async def test_log_probabilities(target: Any, vocabulary: Any) -> None:
    """Log-probabilities are those of the target's raw row for the emitted token, and the likeliest beside it."""
    import numpy as np

    body = {"prompt": "p", "seed": 4, "max_tokens": 12, "temperature": 0.5, "logprobs": 3, "return_token_ids": True}
    choice = (await target.complete(**body, ignore_eos=True))["choices"][0]
    reported = choice["logprobs"]
    language = target.model.language
    state = language.next_state(0, vocabulary.encode("p")[0])
    for index, token in enumerate(choice["token_ids"]):
        row = language.rows([state])[0]
        log_p = row - np.log(np.exp(row).sum())
        assert reported["token_logprobs"][index] == pytest.approx(log_p[token], abs=1e-9)
        top = sorted(reported["top_logprobs"][index].values(), reverse=True)
        assert top[:3] == pytest.approx(sorted(log_p)[::-1][:3], abs=1e-9)
        assert reported["tokens"][index] in reported["top_logprobs"][index]
        state = language.next_state(state, token)
    assert len(reported["tokens"]) == len(reported["text_offset"]) == 12
    assert reported["text_offset"][0] == 0
    streamed = await target.events(**body, ignore_eos=True)
    parts = [json.loads(event)["choices"][0]["logprobs"] for event in streamed[:-1]]
    assert {name: [value for part in parts for value in part[name]] for name in reported} == reported


async def test_special_tokens_have_a_name_and_no_text(target: Any) -> None:
    """A special token in mid-text shows nothing and moves no offset; its log-probability bears its name."""
    bias = {"256": 100.0, "65": 99.0}
    body: dict[str, Any] = {"prompt": "x", "logit_bias": bias, "ignore_eos": True, "max_tokens": 30, "logprobs": 0}
    choice = (await target.complete(**body, seed=2, temperature=2))["choices"][0]
    named, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert {"</s>", "A"} == set(named)
    assert choice["text"] == "A" * named.count("A")
    assert offsets == [named[:index].count("A") for index in range(30)]


async def test_a_real_vocabulary(running: Any) -> None:
    """A tokenizer from the tokenizers package serves as well; text that it encodes comes back in the ids."""
    vocabulary = toy_vocabulary(300)
    async with running(vocabulary, pace=Pace()) as target:
        response = await target.complete(prompt="héllo", max_tokens=20, return_token_ids=True, seed=1)
    choice = response["choices"][0]
    assert vocabulary.decode(choice["prompt_token_ids"]) == "héllo"
    assert choice["text"] == b"".join(vocabulary.token_bytes[id] for id in choice["token_ids"]).decode(errors="replace")
