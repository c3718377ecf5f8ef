"""Small random models of every family that can be exported, and what drives a graph's caches step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

from paceline.export.graph import GraphInfo
from paceline.export.graph_nodes import TYPES

ROWS, TOKENIZER, CONTEXT = 97, 91, 64  # the last 6 rows of the embedding are a padded tail
WINDOW = 13  # shorter than the texts, so that it shows
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [9.0] * 4,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True, "num_key_value_heads": 6},
    "llama-biased": {"family": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 8},
    "llama3-rope": {"family": "llama", "rope_parameters": LLAMA3},
    "mistral": {"sliding_window": WINDOW, "head_dim": 32},
    "qwen2": {},
    "qwen2-window": {
        "family": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 32},
    "qwen3-yarn": {"family": "qwen3", "head_dim": 8, "rope_parameters": YARN},
    "phi3": {},
    "phi3-partial": {"family": "phi3", "head_dim": 32, "partial_rotary_factor": 0.5, "sliding_window": WINDOW},
    "phi3-longrope": {
        "family": "phi3", "head_dim": 8, "original_max_position_embeddings": 64, "rope_parameters": LONG,
    },
    "gemma3_text": {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3-capped": {
        "family": "gemma3_text", "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "head_dim": 24,
        "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 4.0,
    },
}  # fmt: skip


def make(name: str, **overrides: Any) -> Any:
    """A transformers model with seeded weights, large enough for a wrong scale, norm or mask to show."""
    import transformers

    auto: Any = transformers
    settings = {**SHAPE, **MODELS[name], **overrides}
    config = auto.AutoConfig.for_model(settings.pop("family", name), **settings)
    torch.manual_seed(1)
    module = auto.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter if parameter.dim() == 1 else 0))
    return module


class Row(NamedTuple):
    """What one row of a step does: `tokens` are written from `past` on; the successor of tokens[asked] is wanted."""

    row: int
    past: int
    tokens: Sequence[int]
    asked: int


class Drive:
    """Rows of KV in numpy and a graph over them, as a runtime would hold them but for the copies.

    It runs in ONNX Runtime; in bfloat16, for which that has no CPU kernels, in ONNX's own reference evaluator.
    """

    def __init__(self, info: GraphInfo, rows: int) -> None:
        self.info = info
        if info.dtype == "bfloat16":
            self.session: Any = ReferenceEvaluator(onnx.load(info.path))
            self.names = self.session.output_names
        else:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.log_severity_level = 3  # it warns where a cache that is not bound in place is copied
            self.session = ort.InferenceSession(str(info.path), options, providers=["CPUExecutionProvider"])
            self.names = [output.name for output in self.session.get_outputs()]
        self.layers = [f"{part}{{}}.{i}" for i in range(info.layers) for part in ("key", "value")]
        shape = (rows, info.kv_heads, info.max_context, info.head_dim)
        # What lies in slots that nothing was written to must not matter.
        dtype = helper.tensor_dtype_to_np_dtype(TYPES[info.dtype])
        self.cache = {layer: np.full(shape, 7, dtype) for layer in self.layers}

    def step(self, rows: Sequence[Row]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """top_logits and top_ids of the rows, which are neighbours where the profile wants that."""
        width = max(len(row.tokens) for row in rows)
        assert len(rows) == 1 or width == 1 or self.info.multi_token_batch
        index = [row.row for row in rows]
        past = np.array([row.past for row in rows])
        concat = self.info.profile == "concat"
        feed = {
            "input_ids": np.array([[*row.tokens, *[0] * (width - len(row.tokens))] for row in rows]),
            "past_lengths": past,
            "logit_idx": np.array([row.asked for row in rows]),
        }
        for layer, cache in self.cache.items():
            feed[layer.format("")] = cache[index, :, : past.max() if concat else None]
        out = dict(zip(self.names, self.session.run(None, feed), strict=True))
        for layer, cache in self.cache.items():
            result = out[layer.format("_out")]
            if not concat:
                assert result.shape == cache[index].shape
                cache[index] = result
                continue
            for row, new in zip(rows, result, strict=True):
                end = past.max() + len(row.tokens)
                cache[row.row, :, row.past : row.past + len(row.tokens)] = new[:, past.max() : end]
        return out["top_logits"], out["top_ids"]


def tokens(length: int, seed: int) -> list[int]:
    """Reproducible token ids of the tokenizer's."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, TOKENIZER, length)]


def reference(module: Any, text: Sequence[int]) -> NDArray[np.float32]:
    """transformers' own logits after each token of a text, [length, tokenizer's vocabulary]."""
    with torch.inference_mode():
        logits = module(torch.tensor([text])).logits[0, :, :TOKENIZER]
    values: NDArray[np.float32] = logits.float().numpy()
    return values
