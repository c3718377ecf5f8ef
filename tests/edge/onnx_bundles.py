"""Bundles of small random models for ONNX Runtime, without a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from paceline.core import manifest as manifests
from paceline.core.manifest import Dtype, Manifest, ModelEntry, Profile, Quantization
from paceline.export import graph
from paceline.export.quantize import quantize as quantize_graph

VOCABULARY, CONTEXT = 61, 96


def small_llama(**overrides: Any) -> Any:
    """A float32 Llama of two layers with grouped heads; its weights are large enough for mistakes to show."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY + 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.5,
        "tie_word_embeddings": False,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **overrides})).eval()


def make_bundle(
    module: Any,
    folder: Path,
    profile: Profile,
    *,
    max_context: int = CONTEXT,
    max_sessions: int = 6,
    dtype: Dtype = "float32",
    quantize: Quantization | None = None,
    vocabulary_size: int = VOCABULARY,
    **manifest: Any,
) -> Path:
    """A drafter bundle of the module in `folder`. manifest: entries to put in it instead of the right ones."""
    folder.mkdir(parents=True)
    before = module.config._attn_implementation
    info = graph.write(module, folder, profile, dtype, max_context, vocabulary_size)
    module.set_attn_implementation(before)
    if quantize:
        quantize_graph(info.path, info.path, quantize)
    entries: dict[str, Any] = {
        "role": "drafter",
        "runtime": "onnxruntime",
        "profile": profile,
        "model": ModelEntry(name="small", family=info.family, fingerprint=""),
        "tokenizer_fingerprint": "",
        "vocabulary_size": info.vocabulary_size,
        "layers": info.layers,
        "kv_heads": info.kv_heads,
        "head_dim": info.head_dim,
        "max_context": info.max_context,
        "max_sessions": max_sessions,
        "weight_dtype": dtype,
        "kv_dtype": dtype,
        "quantization": quantize,
        "opset": info.opset,
        "top_k": info.top_k,
        "rows": info.rows,
        "multi_token_batch": info.multi_token_batch,
        "files": manifests.checksums(folder, manifests.listed(folder)),
    }
    manifests.write(Manifest(**{**entries, **manifest}), folder)
    return folder
