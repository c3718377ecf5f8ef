"""What the families have in common: one description of a decoder, read off a transformers module.

All of them are the same decoder: norm → attention → add, norm → gated MLP → add. They differ in what this file
says as data: which weights are fused, biases, norms of heads, norms after a block, rope tables, windows, activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.errors import UnsupportedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text")
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Rope:
    """Tables of one rotary embedding, [max_context, width / 2]; the first `width` elements of a head turn."""

    cos: Array
    sin: Array

    @property
    def width(self) -> int:
        return 2 * len(self.cos[0])


@dataclass(frozen=True)
class Linear:
    """weight [in, out], bias [out]."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Norms are gains to multiply with."""

    norm: Array
    qkv: Linear  # query heads, key heads, value heads
    query_norm: Array | None  # [head_dim], of models that norm each head before they turn it
    key_norm: Array | None
    output: Linear
    after_attention_norm: Array | None  # of models that norm a block's output before they add it
    mlp_norm: Array
    gate_up: Linear
    down: Linear
    after_mlp_norm: Array | None
    rope: int  # which of Decoder.ropes
    window: int | None  # a token sees itself and the window - 1 tokens before it


@dataclass(frozen=True)
class Decoder:
    """A model's numbers and what it has once; its layers come one by one from `layers`, as they take memory."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    epsilon: float
    scaling: float  # of query · key
    activation: Literal["silu", "gelu_tanh"]
    ropes: tuple[Rope, ...]
    embedding: Array  # [vocabulary, hidden]
    embedding_scale: float
    final_norm: Array
    head: Array | None  # [hidden, vocabulary]; None where the embedding is the head
    logit_softcap: float | None

    @property
    def vocabulary_size(self) -> int:
        return len(self.embedding)


def check(config: Any) -> None:
    """Raises UnsupportedModel, with what is supported, for a model that the graphs would not compute exactly."""
    family = config.model_type
    if family not in FAMILIES:
        raise UnsupportedModel(f"{family} cannot be exported to ONNX; these families can: {', '.join(FAMILIES)}")
    if _activation(config) not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModel(f"{family}: activation {_activation(config)} cannot be exported; known are {known}")


def describe(module: Any, max_context: int, vocabulary_size: int) -> Decoder:
    """The description of a causal language model of transformers, in float32 on the CPU."""
    config, base = module.config, module.model
    attention = base.layers[0].self_attn
    embedding = array(base.embed_tokens.weight)[:vocabulary_size]
    tied = module.lm_head.weight is base.embed_tokens.weight
    return Decoder(
        family=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        max_context=max_context,
        epsilon=config.rms_norm_eps,
        scaling=attention.scaling,
        activation=ACTIVATIONS[_activation(config)],
        ropes=tuple(_rope(base.rotary_emb, kind, max_context) for kind in _rope_kinds(config)),
        embedding=embedding,
        embedding_scale=getattr(base.embed_tokens, "scalar_embed_scale", 1.0),
        final_norm=_gain(base.norm, config),
        head=None if tied else array(module.lm_head.weight)[:vocabulary_size].T,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )


def layers(module: Any, max_context: int) -> Iterator[Layer]:
    """The layers of the module, each put together when it is its turn."""
    config = module.config
    kinds = _rope_kinds(config)
    for index, layer in enumerate(module.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        sandwiched = hasattr(layer, "pre_feedforward_layernorm")
        yield Layer(
            norm=_gain(layer.input_layernorm, config),
            qkv=_linear(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"),
            query_norm=_gain(attention.q_norm, config) if hasattr(attention, "q_norm") else None,
            key_norm=_gain(attention.k_norm, config) if hasattr(attention, "k_norm") else None,
            output=_linear(attention, "o_proj"),
            after_attention_norm=_gain(layer.post_attention_layernorm, config) if sandwiched else None,
            mlp_norm=_gain(layer.pre_feedforward_layernorm if sandwiched else layer.post_attention_layernorm, config),
            gate_up=_linear(mlp, "gate_up_proj", "gate_proj", "up_proj"),
            down=_linear(mlp, "down_proj"),
            after_mlp_norm=_gain(layer.post_feedforward_layernorm, config) if sandwiched else None,
            rope=0 if kinds == (None,) else kinds.index(config.layer_types[index]),
            window=_window(attention, config, max_context),
        )


def array(tensor: torch.Tensor) -> Array:
    """The tensor's own memory as float32; a copy only where it is another dtype."""
    values: Array = tensor.detach().float().numpy()
    return values


def _linear(owner: Any, *names: str) -> Linear:
    """The first name where the model has that product fused, else the others side by side."""
    parts = [getattr(owner, name) for name in (names[:1] if hasattr(owner, names[0]) else names[1:])]
    weights, biases = [array(part.weight) for part in parts], [part.bias for part in parts]
    bias = None if biases[0] is None else np.concatenate([array(b) for b in biases])
    return Linear((weights[0] if len(weights) == 1 else np.concatenate(weights)).T, bias)


def _gain(norm: Any, config: Any) -> Array:
    """What the normed value is multiplied with; Gemma stores it less one."""
    gain: Array = array(norm.weight) + np.float32(config.model_type.startswith("gemma"))
    return gain


def _rope_kinds(config: Any) -> tuple[str | None, ...]:
    """The layer types that have a rope of their own; (None,) where all layers share one."""
    kinds = getattr(config, "layer_types", None) or ()
    return tuple(sorted(set(kinds))) if config.model_type == "gemma3_text" else (None,)


@torch.inference_mode()
def _rope(rotary: Any, kind: str | None, max_context: int) -> Rope:
    """The module's own tables, whatever its rope type: default, linear, llama3, yarn, partial."""
    positions = torch.arange(max_context)[None]
    cos, sin = rotary(torch.zeros(1), positions, *([] if kind is None else [kind]))
    half = cos.shape[-1] // 2
    return Rope(array(cos[0, :, :half]), array(sin[0, :, :half]))


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _window(attention: Any, config: Any, max_context: int) -> int | None:
    """The layer's window, unless it is wider than a row; Mistral and Phi-3 have one for all in the configuration."""
    owner = config if config.model_type in ("mistral", "phi3") else attention
    window: int | None = getattr(owner, "sliding_window", None)
    return window if window and window < max_context else None
