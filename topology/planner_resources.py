"""What a plan needs of memory and links. Only what can be known is said: None stands for the rest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.topology.spec import DrafterSpec, TargetSpec
from paceline.topology.wire import Draft, Drafted, DraftedItem, DraftItem, Status, encode

PAGE = 256  # KV slots are handed out in pages of so many tokens
PREFIX_BYTES = 4  # of a frame's length
TOKEN_BYTES = 4
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_SESSION, _EPOCH, _POSITION, _CHECK = 1 << 59, 1 << 62, 1000, 1 << 31  # as large as they usually are


@dataclass(frozen=True)
class Memory:
    """Bytes of one process: its KV arena, its weights, and how many tokens the arena holds."""

    node: str
    kv_bytes: int | None
    kv_tokens: int
    weight_bytes: int | None


def memory(node: DrafterSpec | TargetSpec) -> Memory | None:
    """Of one node; None where it holds no model. Only a model that is a local folder can be looked into."""
    if (node.runtime if isinstance(node, DrafterSpec) else node.engine) == "emulated":
        return None
    if isinstance(node, DrafterSpec) and node.strategy == "ngram":
        return None
    folder = Path(node.model or "")
    config = _config(folder)
    dtype = None if isinstance(node, DrafterSpec) else node.dtype
    slot = _slot_bytes(config, dtype, node.device) if config else None
    slots = node.max_sessions * node.max_context
    if node.kv_memory is not None:
        slots = node.kv_memory // slot if slot else slots
    slots = slots // PAGE * PAGE
    return Memory(
        node.name, slots * slot if slot else node.kv_memory, slots, _weights(folder, config, dtype, node.device)
    )


def _config(folder: Path) -> dict[str, object] | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _dtype(config: dict[str, object], dtype: str | None, device: str) -> str:
    """A drafter takes its checkpoint's type, and float32 on a CPU when that is a half type."""
    if dtype is not None:
        return dtype
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "float32" if device == "cpu" and own in ("bfloat16", "float16") else own


def _slot_bytes(config: dict[str, object], dtype: str | None, device: str) -> int | None:
    """Keys and values of one token over all layers."""

    def number(key: str) -> int:
        value = config.get(key)
        return value if isinstance(value, int) else 0

    heads = number("num_attention_heads")
    dim = number("head_dim") or (number("hidden_size") // heads if heads else 0)
    size = ITEM_BYTES.get(_dtype(config, dtype, device), 0)
    return number("num_hidden_layers") * 2 * (number("num_key_value_heads") or heads) * dim * size or None


def _weights(folder: Path, config: dict[str, object] | None, dtype: str | None, device: str) -> int | None:
    """Of the checkpoint's files, as wide as they become in memory."""
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not stored or config is None:
        return None
    own = ITEM_BYTES.get(str(config.get("dtype") or config.get("torch_dtype") or "float32"), 4)
    return stored * ITEM_BYTES.get(_dtype(config, dtype, device), own) // own


@dataclass(frozen=True)
class Traffic:
    """Bytes of one session's round, frames included, TCP's and TLS's own not."""

    up: float
    down: float


def traffic(acceptance: float, k: int, sessions_a_message: float) -> Traffic:
    """A Draft brings the tokens of the last round, a Drafted k proposals; the sessions of a lane share a frame."""
    draft = len(encode(Draft(_EPOCH, []))) + PREFIX_BYTES
    item = len(encode(Draft(_EPOCH, [DraftItem(_SESSION, _POSITION, b"", _CHECK, k)]))) + PREFIX_BYTES - draft
    drafted = len(encode(Drafted(_EPOCH, [], 1000, 10_000))) + PREFIX_BYTES
    answer = DraftedItem(_SESSION, int(Status.OK), _POSITION, _POSITION, b"")
    answered = len(encode(Drafted(_EPOCH, [answer], 1000, 10_000))) + PREFIX_BYTES - drafted
    return Traffic(
        up=draft / sessions_a_message + item + TOKEN_BYTES * acceptance,
        down=drafted / sessions_a_message + answered + TOKEN_BYTES * k,
    )
