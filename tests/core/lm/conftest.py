"""Small random models of every supported family, made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline.core.lm.model import LanguageModel
from paceline.core.model import Segment, Span

VOCABULARY = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 13  # shorter than the prompts, so that it shows
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased": {"family": "llama", "attention_bias": True},
    "llama3-rope": {
        "family": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen2-window": {
        "family": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "phi3": {},
    "phi3-partial": {"family": "phi3", "partial_rotary_factor": 0.5, "sliding_window": WINDOW},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "gemma2": {
        "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip


def make(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A transformers model with seeded weights, large enough for softcaps and windows to matter."""
    import transformers

    auto: Any = transformers
    settings = {**SHAPE, **FAMILIES.get(name, {}), **overrides}
    family = settings.pop("family", name)
    config = auto.AutoConfig.for_model(family, **settings)
    torch.manual_seed(1)
    # transformers' sdpa refuses softcap; its eager attention softmaxes in float32 even in float64, so only there.
    attention = "eager" if family == "gemma2" else "sdpa"
    module = auto.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter if parameter.dim() == 1 else 0))
    if "moe" in family and dtype == torch.float64:
        module.set_experts_implementation("eager")
    return module.to(dtype)


def tokens(length: int, seed: int) -> list[int]:
    """Reproducible token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()


def chunked(
    model: LanguageModel, spans: list[Span], texts: list[list[int]], sizes: list[int]
) -> Iterator[list[torch.Tensor]]:
    """Feeds every text into its span, all packed together and each in chunks of its own; yields logits per session."""
    at = [0] * len(texts)
    turn = 0
    while any(start < len(text) for start, text in zip(at, texts, strict=True)):
        segments, owners = [], []
        for i, text in enumerate(texts):
            part = text[at[i] : at[i] + sizes[(turn + i) % len(sizes)]]
            if part:
                segments.append(Segment(spans[i], at[i], part, len(part)))
                owners.append(i)
                at[i] += len(part)
        logits = torch.split(model.forward(segments), [segment.rows for segment in segments])
        yield [logits[owners.index(i)] if i in owners else logits[0][:0] for i in range(len(texts))]
        turn += 1


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps the tests off the other cores and their sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_model() -> Callable[..., Any]:
    return make


@pytest.fixture
def make_tokens() -> Callable[[int, int], list[int]]:
    return tokens


@pytest.fixture
def feed() -> Callable[..., Iterator[list[torch.Tensor]]]:
    return chunked


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)
