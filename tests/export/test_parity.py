"""The parity check lets right graphs pass and names what is wrong in others: the layer, or the input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

from paceline.core.lm.loading import load
from paceline.export import graph, parity
from paceline.export.parity_cases import ROWS
from paceline.export.parity_figures import TOLERANCES, Extent, Parity, ParityFailed, Tolerance
from paceline.export.parity_subjects import GraphSubject, Shape, TorchSubject

from .bundle_models import edit_weight, model_folder, need
from .graph_models import tokens

CONTEXT = 96
TEXTS = [tokens(70 + 9 * n, 20 + n) for n in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("llama"))


def run(folder: Path, out: Path, change: Callable[[Path], None] = lambda path: None, **options: Any) -> Parity:
    """Writes the graph of a model, lets `change` break it, and compares."""
    profile, dtype = options.get("profile", "gqa"), options.get("dtype", "float32")
    info = graph.build(folder, out, profile=profile, dtype=dtype, max_context=CONTEXT, vocabulary_size=2048)
    change(info.path)
    model = load(folder, dtype="float32", kv_slots=4 * 256, max_context=CONTEXT, fused=False)
    reference = TorchSubject(model, rows=ROWS, max_context=CONTEXT, vocabulary_size=2048)
    shape = Shape(info.layers, info.kv_heads, CONTEXT, info.head_dim, np.dtype(dtype))
    subject = GraphSubject(info.path, info.profile, shape, rows=ROWS)
    told: list[int] = []
    extent = Extent(info.layers, CONTEXT, info.multi_token_batch, dtype)
    found = parity.check(reference, subject, extent, TEXTS, told.append)
    assert sum(told) == parity.count(extent, TEXTS)
    return found


def refusal(folder: Path, out: Path, change: Callable[[Path], None] = lambda path: None, **options: Any) -> str:
    with pytest.raises(ParityFailed) as caught:
        run(folder, out, change, **options)
    return str(caught.value)


@pytest.mark.parametrize("profile", graph.PROFILES)
def test_a_right_graph_passes(folder: Path, tmp_path: Path, profile: str) -> None:
    """In every profile; a case for each kind of step that the profile takes, and every position of the texts."""
    need(profile)
    found = run(folder, tmp_path, profile=profile)
    assert found.max_difference < 2e-4 and found.kv_difference < 2e-4
    assert found.top1_agreement == 1 and found.agreement == {"0": 1.0, "0.8": 1.0}
    assert found.text_positions == sum(min(len(text), CONTEXT) - (16 + 3 * (n % 4)) + 1 for n, text in enumerate(TEXTS))
    assert ("ragged batch, several tokens" in found.cases) == (profile != "gqa")


def test_half_precision_has_wider_bounds(folder: Path, tmp_path: Path) -> None:
    """What it loses is within them, and is reported."""
    found = run(folder, tmp_path, dtype="float16")
    assert 1e-4 < found.logit_difference < found.tolerance["logits"]


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        ("layer.1/qkv.weight", "layer 1's keys and values differ first"),
        ("layer.1/norm", "layer 1's keys and values differ first"),
        ("layer.1/down.weight", "layer 2's keys and values differ first"),
        ("layer.2/down.weight", "all keys and values agree: look at layer 2's attention and MLP"),
        ("head/weight", "all keys and values agree: look at layer 2's attention and MLP, the final norm and the head"),
        ("embedding", "layer 0's keys and values differ first"),
    ],
)
def test_a_changed_weight_is_found_in_its_layer(folder: Path, tmp_path: Path, weight: str, words: str) -> None:
    """5 % in one row or column of it are enough."""

    def change(values: Any) -> Any:
        values[..., ::4] *= 1.05
        return values

    message = refusal(folder, tmp_path, lambda path: edit_weight(path, weight, change))
    assert words in message and "in `past 0, one token`" in message and "\n" not in message


def test_only_the_wrong_projection_is_named(folder: Path, tmp_path: Path) -> None:
    """Keys of layer 1 alone: its values and the layers before it agree."""

    def change(values: Any) -> Any:
        values[:, 96:128] *= 1.05  # 6 query heads of 16, then 2 key heads
        return values

    message = refusal(folder, tmp_path, lambda path: edit_weight(path, "layer.1/qkv.weight", change))
    assert "layer 1's keys differ first" in message and "look at layer 1's key projection" in message


def test_rope_that_is_off_by_one_is_found(folder: Path, tmp_path: Path) -> None:
    """Position 0 is turned as position 1 is: the keys of layer 0 differ, its values agree."""

    def change(path: Path) -> None:
        for table in ("cos", "sin"):
            edit_weight(path, f"positions/{table}.0", lambda values: np.roll(values, -1, axis=0))

    message = refusal(folder, tmp_path, change)
    assert "layer 0's keys differ first" in message and "rotary embedding and past_lengths" in message


def test_rope_that_is_wrong_far_away_is_found(folder: Path, tmp_path: Path) -> None:
    """Only the last position's row of the table: nothing but the long context shows it."""

    def change(values: Any) -> Any:
        values[-1] *= 0.5
        return values

    message = refusal(folder, tmp_path, lambda path: edit_weight(path, "positions/sin.0", change))
    assert "in `long context`" in message and f"from position {CONTEXT - 1} of row 0 on" in message


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_window_that_the_graph_forgets_is_found(tmp_path: Path, name: str) -> None:
    """A graph of the same weights without its sliding windows differs only once there is more past than window."""
    import onnx

    folder = model_folder(tmp_path / "model", name)

    def change(path: Path) -> None:
        model = onnx.load(path)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "local_window_size":
                    attribute.i = -1
        onnx.save_model(model, path.with_name("edited.onnx"))
        path.with_name("edited.onnx").replace(path)

    (tmp_path / "good").mkdir(), (tmp_path / "bad").mkdir()
    assert run(folder, tmp_path / "good").agreement["0.8"] == 1.0
    message = refusal(folder, tmp_path / "bad", change)
    assert "in `several tokens after a past`" in message and "layer 1's keys and values differ first" in message


def test_an_input_that_is_not_followed_is_named(folder: Path, tmp_path: Path) -> None:
    """A graph that always returns the first token's candidates."""
    import onnx
    from onnx import helper

    def change(path: Path) -> None:
        model = onnx.load(path)
        zero = helper.make_node("Sub", ["logit_idx", "logit_idx"], ["no_idx"])
        for node in model.graph.node:
            node.input[:] = ["no_idx" if name == "logit_idx" else name for name in node.input]
        model.graph.node.insert(0, zero)
        onnx.save_model(model, path.with_name("edited.onnx"))
        path.with_name("edited.onnx").replace(path)

    message = refusal(folder, tmp_path, change)
    assert "they are those of new token 0: the input logit_idx is not followed" in message


def test_numbers_that_are_none_do_not_pass(folder: Path, tmp_path: Path) -> None:
    """NaN compares as smaller than every bound, unless one takes care."""

    def change(values: Any) -> Any:
        values[0] = np.nan
        return values

    assert "differ first" in refusal(folder, tmp_path, lambda path: edit_weight(path, "layer.0/norm", change))


def test_too_little_agreement_on_text_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that stays within the bounds of every step, and yet changes too many choices."""
    monkeypatch.setitem(TOLERANCES, "float32", Tolerance(9.0, 9.0, 0.995))

    def change(values: Any) -> Any:
        return values * (1 + 0.2 * np.random.default_rng(0).standard_normal(values.shape))

    message = refusal(folder, tmp_path, lambda path: edit_weight(path, "head/weight", change))
    assert "on real text the bundle chooses the same token" in message and "less than the 99.5%" in message
