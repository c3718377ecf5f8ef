"""A GGUF file of the llama architecture as a Hugging Face folder: weights, configuration, tokenizer, chat template.

llama.cpp stores the rows of the query and key projections interleaved for its rotary embedding; here they are put back
in order. Runs without torch: the `gguf` package reads and dequantises, safetensors writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.core.errors import UnsupportedModel

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # gguf.TokenType

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

FloatArray = npt.NDArray[np.floating[Any]]


def convert(source: Path, folder: Path, dtype: type[np.floating[Any]] = np.float16) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer of `source` into `folder`."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"{source}: architecture {architecture!r}; only llama is converted")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(read_tensors(reader, fields["llama.attention.head_count"], key_value_heads(fields), dtype))
    tokenizer = build_tokenizer(fields)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it readable for its owner only
    tokenizer.save(str(folder / "tokenizer.json"))
    config = model_config(fields, tied="lm_head.weight" not in tensors, dtype=np.dtype(dtype).name)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special)
    write_json(folder / "tokenizer_config.json", tokenizer_config(fields))


def read_tensors(
    reader: gguf.GGUFReader, heads: int, kv_heads: int, dtype: type[np.floating[Any]]
) -> Iterator[tuple[str, FloatArray]]:
    """Every weight under its Hugging Face name, dequantised, [out, in], as `dtype`."""
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            weight = unpermute(weight, heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = unpermute(weight, kv_heads)
        yield hugging_face_name(tensor.name), np.ascontiguousarray(weight, dtype=dtype)


def hugging_face_name(name: str) -> str:
    """blk.3.attn_q.weight → model.layers.3.self_attn.q_proj.weight."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[2] not in NAMES:
        raise UnsupportedModel(f"tensor {name!r} has no place in a Hugging Face llama")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{NAMES[match[2]]}.weight"


def unpermute(weight: FloatArray, heads: int) -> FloatArray:
    """Undo llama.cpp's interleaving of a projection's rows: in each head, (pair, half) back to (half, pair)."""
    rows, columns = weight.shape
    restored: FloatArray = weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return restored


def key_value_heads(fields: dict[str, Any]) -> int:
    return int(fields.get("llama.attention.head_count_kv", fields["llama.attention.head_count"]))


def model_config(fields: dict[str, Any], tied: bool, dtype: str) -> dict[str, Any]:
    """config.json for LlamaForCausalLM."""
    if fields.get("llama.rope.scaling.type", "none") != "none":
        raise UnsupportedModel(f"rope scaling {fields['llama.rope.scaling.type']!r} is not converted")
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads(fields),
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.get("llama.rope.freq_base", 10000.0)},
        "tie_word_embeddings": tied,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": dtype,
    }


def build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE from the vocabulary, merges and token types that the file carries."""
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in ("smollm", "gpt-2"):
        raise UnsupportedModel(f"tokenizer {kind!r} with pre-tokenizer {split!r}; known are gpt2 with smollm or gpt-2")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(fields.get("tokenizer.ggml.add_space_prefix", False)))
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    for token, kind_of_token in zip(tokens, types, strict=True):
        if kind_of_token in (CONTROL, USER_DEFINED):
            special = kind_of_token == CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    return tokenizer


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json: names of the special tokens, and the chat template as the file has it."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (index := fields.get(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            config[f"{ours}_token"] = tokens[index]
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def write_json(path: Path, content: dict[str, Any]) -> None:
    kept = {name: value for name, value in content.items() if value is not None}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
