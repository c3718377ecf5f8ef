"""From a path or hub id to a `LanguageModel`: checks first, in words; then weights, arena and the fused forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from paceline.core import manifest as manifests
from paceline.core.errors import UnsupportedModel, UserError
from paceline.core.lm.arena import PAGE, Arena, slot_bytes
from paceline.core.lm.fuse import fuse
from paceline.core.lm.model import LanguageModel
from paceline.core.model import Segment
from paceline.core.model_folder import existing_folder

# model_type → what each of these passes to its attention is checked in tests/core/lm against transformers' generate.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "smollm3", "olmo2", "gemma2", "gemma3_text",
)  # fmt: skip
# Rope tables that do not depend on how long the other sessions of a forward are.
STEADY_ROPE = {"default", "linear", "llama3", "yarn"}
# What is fetched of a hub id. The last three: a bundle carries the model's licence along.
FILES = ["*.json", "*.safetensors", "*.jinja", "LICENSE*", "NOTICE*", "README.md"]
DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


def load(
    path: str | Path,
    *,
    device: str = "cpu",
    dtype: str | torch.dtype = "auto",
    threads: int | None = None,
    kv_slots: int | None = None,
    kv_memory: int | None = None,
    max_context: int | None = None,
    fused: bool = True,
    role: manifests.Role | None = None,
) -> LanguageModel:
    """Loads a causal language model from a directory, a bundle or a hub id.

    dtype: a name, or "auto" for the checkpoint's own (float32 on a CPU when that is a half type, which CPUs run
    slowly). threads: torch's, for the whole process. kv_memory is in bytes, kv_slots in tokens; with neither, one
    session of max_context (default: the model's own limit) fits. role: what a bundle must have been made for; its
    checksums are compared. Raises UserError for what is missing, changed or does not fit, UnsupportedModel for a family
    or rope the packed forward cannot run exactly.
    """
    if threads:
        torch.set_num_threads(threads)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {device} was asked for, but torch finds no CUDA here")
    folder = local_folder(path)
    if manifests.is_bundle(folder):
        max_context = _check_bundle(folder, role, max_context)
    config = read_config(folder)
    check_family(config, max_context)
    module = _module(folder, config, _dtype(config, dtype, device)).to(device)
    return wrap(module, kv_slots=kv_slots, kv_memory=kv_memory, max_context=max_context, fused=fused, name=str(path))


def wrap(
    module: Any,
    *,
    kv_slots: int | None = None,
    kv_memory: int | None = None,
    max_context: int | None = None,
    fused: bool = True,
    name: str = "model",
) -> LanguageModel:
    """A `LanguageModel` over a transformers causal language model that is in memory already; see `load`."""
    config = module.config
    check_family(config, max_context)
    context = min(max_context or config.max_position_embeddings, config.max_position_embeddings)
    layers, kv_heads, dim = kv_shape(config)
    if kv_memory is not None:
        kv_slots = kv_memory // slot_bytes(layers, kv_heads, dim, module.dtype)
    arena = Arena(
        layers=layers,
        slots=-(-context // PAGE) * PAGE if kv_slots is None else kv_slots,
        kv_heads=kv_heads,
        head_dim=dim,
        dtype=module.dtype,
        device=module.device,
    )
    module.eval().requires_grad_(False)
    if module.dtype == torch.float64 and "moe" in config.model_type:
        module.set_experts_implementation("eager")  # torch's grouped product has no float64
    forward = fuse(module, arena, context) if fused else None
    model = LanguageModel(module, arena, name=name, max_context=context, fused=forward)
    # What this attention passes shows in a forward only: better here than in the middle of a request.
    if span := model.allocate(1):
        model.forward([Segment(span, 0, [0], 1)])
        model.free(span)
    return model


def kv_shape(config: Any) -> tuple[int, int, int]:
    """Layers, key-value heads and the elements of a head, of a transformers configuration."""
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, kv_heads, dim


def _check_bundle(folder: Path, role: manifests.Role | None, max_context: int | None) -> int:
    """Compares a bundle's checksums; returns the longest session it is for, or `max_context` where that is less."""
    manifest = manifests.read(folder)
    manifests.fit(manifest, folder, role=role, runtime="torch", max_context=max_context)
    manifests.load(folder, role=role)
    return max_context or manifest.max_context


def cpu_threads() -> int:
    """How many threads torch uses in this process."""
    return torch.get_num_threads()


def local_folder(path: str | Path) -> Path:
    """The folder of a model: a local one as it is, a hub id's downloaded (or taken from the hub's own cache).

    UserError says which it was taken for and what went wrong.
    """
    if (local := existing_folder(path)) is not None:
        return local
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path} is no directory here, and as a hub id it cannot be had: {reason}") from error


def check_family(config: Any, max_context: int | None = None) -> None:
    """Raises UnsupportedModel, naming family and reason, unless the packed forward runs this model exactly."""
    family = config.model_type
    if family not in FAMILIES:
        raise UnsupportedModel(f"{family}: not a supported family; supported are {', '.join(FAMILIES)}")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(f"{family}: bidirectional attention cannot be decoded token by token")
    limit = config.max_position_embeddings
    if max_context is not None and max_context > limit:
        raise UserError(f"max_context {max_context} is more than this {family} model's {limit} positions: lower it")
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]:
        name = kind.get("rope_type", "default")
        original = kind.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", limit
        )
        # longrope swaps its table for the whole forward once one session is longer than the original context.
        if name not in STEADY_ROPE and not (name == "longrope" and (max_context or limit) <= original):
            hint = f"; with max_context up to {original} it can" if name == "longrope" else ""
            raise UnsupportedModel(
                f"{family}: {name} rope depends on the longest session of a forward, so it cannot be packed{hint}"
            )


def read_config(path: Path) -> Any:
    """transformers' configuration of the language model in a folder. Raises UserError."""
    if not (path / "config.json").is_file():
        raise UserError(f"no model at {path}: the directory has no config.json")
    try:
        with _quiet():
            config = _transformers().AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from error
    return config.get_text_config() if config.model_type == "gemma3" else config


def _module(path: Path, config: Any, dtype: torch.dtype) -> Any:
    try:
        with _quiet():
            module, report = _transformers().AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    # transformers fills what a checkpoint lacks with random numbers and a warning.
    if report["missing_keys"]:
        raise UserError(f"the weights of {path} are incomplete: {sorted(report['missing_keys'])[0]} is missing")
    return module


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"cannot read the model {path}: {str(error).strip().splitlines()[0]}")


def _dtype(config: Any, dtype: str | torch.dtype, device: str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype} is not known: use auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    own = getattr(config, "dtype", None) or torch.float32
    own = own if isinstance(own, torch.dtype) else DTYPES.get(str(own), torch.float32)
    return torch.float32 if device == "cpu" and own.itemsize == 2 else own


def _transformers() -> Any:
    """transformers, late, because it takes seconds; and as Any, because its types are partial."""
    import transformers

    return transformers


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' progress bars and advice off the terminal while a model loads."""
    noise = _transformers().utils.logging
    level, bars = noise.get_verbosity(), noise.is_progress_bar_enabled()
    noise.set_verbosity_error()
    noise.disable_progress_bar()
    try:
        yield
    finally:
        noise.set_verbosity(level)
        if bars:
            noise.enable_progress_bar()
