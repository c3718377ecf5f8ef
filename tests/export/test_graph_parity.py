"""Every family in every profile, driven as a drafter drives it, against transformers' own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import onnxruntime as ort

from paceline.export import graph_family
from paceline.export.graph import PROFILES, GraphInfo, Profile, write
from paceline.export.graph_family import Layer, Linear

from .graph_models import CONTEXT, MODELS, TOKENIZER, Drive, Row, make, reference, tokens

RELEASE = tuple(map(int, ort.__version__.split(".")[:2]))
LENGTHS = [CONTEXT, 41, CONTEXT]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps sums in one order and the tests off the other cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def model(name: str) -> tuple[Any, list[list[int]], list[Any]]:
    """A model, a text for each row, and the logits that transformers has for each."""
    module = make(name)
    texts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    return module, texts, [reference(module, text) for text in texts]


def steps(texts: Sequence[Sequence[int]]) -> Iterator[list[Row]]:
    """A drafter's life: prompts of different lengths, single tokens, several, rollbacks, the last slot of a row."""
    at = [0] * len(texts)

    def part(row: int, count: int, asked: int | None = None) -> Row:
        new = texts[row][at[row] : at[row] + count]
        at[row] += len(new)
        return Row(row, at[row] - len(new), new, len(new) - 1 if asked is None else asked)

    yield [part(0, 20), part(1, 7), part(2, 13, asked=4)]  # past 0
    yield [part(row, 1) for row in range(3)]
    yield [part(0, 1), part(1, 5), part(2, 3, asked=0)]
    # Rejected drafts: other tokens at the next places, which the step after this one writes again.
    yield [Row(row, at[row], tokens(6, 50 + row), 5) for row in range(3)]
    yield [part(1, 2), part(2, 1)]  # a window of rows that does not begin at the first
    yield [part(0, 3)]
    at = [position - 2 for position in at]  # a rollback, and the same tokens again
    yield [part(row, 4) for row in range(3)]
    while at[0] < CONTEXT:  # far past the window; row 0 and row 2 end in their last slot
        yield [part(row, count) for row, count in ((0, 9), (1, 2), (2, 11)) if at[row] < len(texts[row])]
    while at[2] < CONTEXT:
        yield [part(2, 1)]


def portions(rows: list[Row], info: GraphInfo) -> list[list[Row]]:
    """The step as the profile takes it: row by row where it may not be padded, else at once."""
    width = max(len(row.tokens) for row in rows)
    past_the_end = max(row.past for row in rows) + width > CONTEXT and info.profile == "static-native"
    if width == 1 or (info.multi_token_batch and not past_the_end):
        return [rows]
    return [[row] for row in rows]


def largest_difference(drive: Drive, texts: Sequence[Sequence[int]], expected: Sequence[Any]) -> float:
    """Of every asked position's top logits, over the scale of the model's logits; checks their order too."""
    scale = max(float(np.abs(logits).max()) for logits in expected)
    worst, compared = 0.0, 0
    for step in steps(texts):
        for rows in portions(step, drive.info):
            logits, ids = drive.step(rows)
            assert logits.shape == ids.shape == (len(rows), 64)
            assert (np.diff(logits) <= 0).all()
            assert ids.max() < TOKENIZER, "the padded tail came out"
            for row, values, columns in zip(rows, logits, ids, strict=True):
                if list(row.tokens) != list(texts[row.row][row.past : row.past + len(row.tokens)]):
                    continue  # the rejected ones
                wanted = expected[row.row][row.past + row.asked]
                assert len(set(columns.tolist())) == 64
                errors = np.abs(values - wanted[columns]), np.abs(values - np.sort(wanted)[::-1][:64])
                worst = max(worst, *(float(error.max()) / scale for error in errors))
                compared += 1
    assert compared > 20
    return worst


def compare(name: str, profile: Profile, dtype: str, folder: Path) -> float:
    """The largest difference of a cell of the table, printed; skips where this ONNX Runtime refuses the graph."""
    module, texts, expected = model(name)
    info = write(module, folder, profile, dtype, CONTEXT, TOKENIZER)
    if dtype != "bfloat16" and tuple(map(int, info.least_onnxruntime.split("."))) > RELEASE:
        pytest.skip(f"this graph needs ONNX Runtime {info.least_onnxruntime}, here is {ort.__version__}")
    difference = largest_difference(Drive(info, len(texts)), texts, expected)
    print(f"{name} {profile} {dtype}: {difference:.1e} of the largest logit")
    return difference


@cache
def own_difference(name: str, dtype: torch.dtype) -> float:
    """How far transformers' forward in a half type is from its float32, in the same measure."""
    module, texts, expected = model(name)
    half = copy.deepcopy(module).to(dtype)
    pairs = [(reference(half, text), logits) for text, logits in zip(texts, expected, strict=True)]
    return max(float(np.abs(a - b).max()) for a, b in pairs) / max(float(np.abs(b).max()) for _, b in pairs)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", MODELS)
def test_top_logits_are_those_of_transformers(name: str, profile: Profile, tmp_path: Path) -> None:
    """In float32 the graph's 64 likeliest tokens have transformers' logits, whatever was written before."""
    assert compare(name, profile, "float32", tmp_path) < 5e-6


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_loses_no_more_than_transformers(name: str, profile: Profile, tmp_path: Path) -> None:
    """A float16 graph is at least as near to float32 as transformers' own float16, as its sums are float32."""
    assert compare(name, profile, "float16", tmp_path) < own_difference(name, torch.float16)


@pytest.mark.parametrize("profile", ["static-compat", "static-native", "concat"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_bfloat16_by_the_reference(name: str, profile: Profile, tmp_path: Path) -> None:
    """ONNX's reference evaluator, which shares nothing with a runtime, agrees on what the graph means in bfloat16."""
    assert compare(name, profile, "bfloat16", tmp_path) < own_difference(name, torch.bfloat16)


WRONG: dict[str, Callable[[Layer], dict[str, Any]]] = {
    "a window one token wider": lambda layer: {"window": layer.window and layer.window + 1},
    "the other rope table": lambda layer: {"rope": 1 - layer.rope},
    "no norm of the keys": lambda layer: {"key_norm": np.ones_like(layer.key_norm)},
    "a head in another's place": lambda layer: {"qkv": Linear(np.roll(layer.qkv.weight, 16, 1), None)},
    "gate and up exchanged": lambda layer: {"gate_up": Linear(np.roll(layer.gate_up.weight, 64, 1), None)},
    "no norm after attention": lambda layer: {"after_attention_norm": None},
}


@pytest.mark.parametrize("mistake", WRONG)
@pytest.mark.parametrize("profile", PROFILES)
def test_a_mistake_shows(profile: Profile, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These texts and weights tell a graph that is wrong in one detail of one layer from a right one."""
    layers = graph_family.layers

    def wrong(module: Any, max_context: int) -> Iterator[Layer]:
        for index, layer in enumerate(layers(module, max_context)):
            yield replace(layer, **WRONG[mistake](layer)) if index == 0 else layer

    monkeypatch.setattr(graph_family, "layers", wrong)
    assert compare("gemma3_text", profile, "float32", tmp_path) > 1e-3
