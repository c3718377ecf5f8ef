"""Loading: what is accepted, and in which words the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import UnsupportedModel, UserError
from paceline.core.lm.attention import packed_attention
from paceline.core.lm.loading import load, wrap
from paceline.core.model import PackedModel, Segment

MakeModel = Callable[..., Any]


@pytest.fixture
def saved(tmp_path: Path, make_model: MakeModel) -> Path:
    """A small Llama in a directory."""
    make_model("llama").save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def test_a_directory_loads_and_runs_like_the_module(saved: Path, make_model: MakeModel) -> None:
    """Weights come from safetensors, and context and KV memory are what was asked for."""
    model: PackedModel = load(saved, threads=1, kv_slots=1000, max_context=200)
    assert (model.max_context, model.kv_slots, model.vocabulary_size) == (200, 768, 97)
    span = model.allocate(200)
    assert span
    text = list(range(1, 30))
    with torch.inference_mode():
        expected = make_model("llama")(torch.tensor([text])).logits[0]
    assert torch.allclose(model.forward([Segment(span, 0, text, len(text))]), expected, rtol=0, atol=1e-4)


def test_loading_says_nothing(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No progress bars and no advice on the terminal."""
    load(saved, kv_slots=256)
    assert capfd.readouterr() == ("", "")


def test_kv_memory_is_a_budget_in_bytes(saved: Path) -> None:
    """The arena is the largest number of whole pages that fits the budget."""
    slot = 2 * 2 * 2 * 8 * 4  # layers × (key, value) × kv_heads × head_dim × bytes
    assert load(saved, kv_memory=600 * slot).kv_slots == 512
    with pytest.raises(UserError, match="raise kv_memory"):
        load(saved, kv_memory=100 * slot)


def test_without_a_budget_one_longest_session_fits(saved: Path) -> None:
    """The default arena holds one session of max_context."""
    model = load(saved, max_context=300)
    assert model.kv_slots == 512
    assert model.allocate(300) is not None


def test_dtype_is_the_checkpoints_own_or_as_asked(saved: Path, tmp_path: Path, make_model: MakeModel) -> None:
    """On a CPU, half types are widened unless asked for; names are checked."""
    make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert load(tmp_path / "half").arena.kv.dtype == torch.float32
    assert load(tmp_path / "half", dtype="bfloat16").arena.kv.dtype == torch.bfloat16
    assert load(saved, dtype="float64").arena.kv.dtype == torch.float64
    with pytest.raises(UserError, match="dtype int8 is not known"):
        load(saved, dtype="int8")


def test_what_is_missing_is_named_in_one_sentence(tmp_path: Path, saved: Path) -> None:
    """Missing directories, files and weights, and a device that is not there."""
    with pytest.raises(UserError, match="there is no such directory"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        load(tmp_path / "empty")
    (saved / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot read the model"):
        load(saved)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="finds no CUDA"):
            load(saved, device="cuda:0")


def test_incomplete_weights_are_refused(saved: Path) -> None:
    """transformers would fill the gap with random numbers."""
    weights = load_file(saved / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"incomplete: model\.norm\.weight is missing"):
        load(saved)


def test_more_context_than_positions_is_refused(saved: Path) -> None:
    """max_context beyond the model's own positions would extrapolate silently."""
    with pytest.raises(UserError, match="more than this llama model's 512 positions"):
        load(saved, max_context=513)


def test_an_unknown_family_is_refused_by_name(make_model: MakeModel) -> None:
    """GPT-NeoX is not on the list."""
    with pytest.raises(UnsupportedModel, match="gpt_neox: not a supported family"):
        wrap(make_model("gpt_neox"))


def test_a_rope_that_depends_on_other_sessions_is_refused(make_model: MakeModel) -> None:
    """Dynamic rope never packs; longrope does within the original context."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="llama: dynamic rope depends on the longest session"):
        wrap(make_model("llama", rope_parameters=dynamic))
    factors = [1.0] * 4
    long = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors}
    module = make_model("phi3", rope_parameters=long, original_max_position_embeddings=128)
    with pytest.raises(UnsupportedModel, match="with max_context up to 128 it can"):
        wrap(module)
    assert wrap(module, max_context=128).max_context == 128


def test_a_model_whose_attention_passes_more_is_refused_at_load(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes when the model is wrapped, before any request."""
    module = make_model("olmo2")
    attention = module.model.layers[1].self_attn
    plain = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *a, **k: plain(*a, **k, position_bias=torch.zeros(1)))
    with pytest.raises(UnsupportedModel, match="olmo2: its attention passes position_bias"):
        wrap(module)


def test_an_unknown_attention_keyword_is_refused(make_model: MakeModel) -> None:
    """A keyword that may mean something is named together with the family, not ignored."""
    module = make_model("llama").model.layers[0].self_attn
    heads = torch.zeros(1, 6, 1, 8), torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)
    with pytest.raises(UnsupportedModel, match="llama: its attention passes position_bias"):
        packed_attention(module, *heads, None, scaling=1.0, position_bias=torch.zeros(1))
    with pytest.raises(UnsupportedModel, match="llama: its attention passes dropout"):
        packed_attention(module, *heads, None, scaling=1.0, dropout=0.1)
    with pytest.raises(UnsupportedModel, match="llama: its layers do not hand keywords on"):
        packed_attention(module, *heads, None, scaling=1.0, position_bias=None)
