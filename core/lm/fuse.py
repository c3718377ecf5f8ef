"""The eager forward of Llama-shaped decoders in a third of the operations, at the same mathematics.

In a small model on a CPU the interpreter and torch's dispatch cost more than the arithmetic: transformers spends
0.7 ms on a layer 192 wide. Here a layer is 20 operations. What makes them few:

- query, key and value are one product, gate and up another; residuals ride in `addmm`.
- A norm's gain is folded into the product that follows, as (x/r)·g @ W = x/r @ (g·W).
- Rotary embedding is one complex product, in place. Interleaving the two halves of each head (rows of W) makes a
  pair a complex number; scores do not change when queries and keys are permuted alike.
- cos and sin are the module's own, tabled for every position; new keys and values reach the arena in one copy.

The weights are copies, hence only for models small enough that this matters (`LIMIT`). Larger models, other shapes,
other dtypes and CUDA run the module's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from paceline.core.lm.arena import Arena
from paceline.core.lm.attention import Packing, attend

FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3"}
LIMIT = 512 * 2**20  # bytes of copied weights


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer, each [in, out]."""

    qkv: torch.Tensor  # columns: query heads, key heads (both interleaved), value heads
    qkv_bias: torch.Tensor | None
    head_gain: torch.Tensor | None  # [heads + kv_heads, dim], of models that norm each head
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    rotary: bool
    window: int | None


def fuse(module: Any, arena: Arena, max_context: int) -> FusedForward | None:
    """The fused forward of `module`, or None when its shape, size, dtype or device does not fit."""
    config = module.config
    if (
        config.model_type not in FAMILIES
        or arena.kv.device.type != "cpu"
        or arena.kv.dtype not in (torch.float32, torch.float64)
        or config.hidden_act != "silu"
        or arena.head_dim % 2
        or module.lm_head.bias is not None
    ):
        return None
    layers = module.model.layers
    if any(layer.self_attn.o_proj.bias is not None or layer.mlp.down_proj.bias is not None for layer in layers):
        return None
    if sum(p.numel() * p.element_size() for p in layers.parameters()) > LIMIT:
        return None
    if module.model.rotary_emb.inv_freq.numel() * 2 != arena.head_dim:  # partial rotary
        return None
    with torch.inference_mode():
        return FusedForward(module, arena, max_context)


class FusedForward:
    """The forward of one module over one arena."""

    def __init__(self, module: Any, arena: Arena, max_context: int) -> None:
        self.arena, self.config, base = arena, module.config, module.model
        self.heads: int = self.config.num_attention_heads
        self.scaling: float = base.layers[0].self_attn.scaling
        self.width, self.dim = self.config.hidden_size, arena.head_dim
        self.norm = _norm(self.width, self.config.rms_norm_eps, arena.kv.dtype)
        self.head_norm = _norm(self.dim, self.config.rms_norm_eps, arena.kv.dtype, interleaved=True)
        self.embedding: torch.Tensor = base.embed_tokens.weight
        self.head: torch.Tensor = module.lm_head.weight
        self.final_gain: torch.Tensor = base.norm.weight * self.width**0.5
        self.layers = [self._layer(layer) for layer in base.layers]
        positions = torch.arange(max_context, device=arena.kv.device)[None]
        cos, sin = base.rotary_emb(self.embedding, positions)
        half = arena.head_dim // 2
        self.rotation = torch.complex(cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous())

    def _layer(self, layer: Any) -> Layer:
        attention, mlp, dim = layer.self_attn, layer.mlp, self.dim
        root = self.width**0.5
        gain, mlp_gain = layer.input_layernorm.weight * root, layer.post_attention_layernorm.weight * root
        if hasattr(attention, "qkv_proj"):
            weight, bias = attention.qkv_proj.weight, attention.qkv_proj.bias
            gate_up = mlp.gate_up_proj.weight
        else:
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            weight = torch.cat([part.weight for part in parts])
            bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
            gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        order = self._interleaved()
        head_gain = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm.weight] * self.heads + [attention.k_norm.weight] * self.arena.kv_heads
            head_gain = torch.stack(norms).flatten()[order[: len(norms) * dim]].view(len(norms), dim) * dim**0.5
        return Layer(
            qkv=(weight * gain)[order].t().contiguous(),
            qkv_bias=None if bias is None else bias[order],
            head_gain=head_gain,
            output=attention.o_proj.weight.t(),
            gate_up=(gate_up * mlp_gain).t().contiguous(),
            down=mlp.down_proj.weight.t(),
            rotary=bool(getattr(attention, "use_rope", True)),
            window=_window(attention, self.config),
        )

    def _interleaved(self) -> torch.Tensor:
        """Order of the rows of qkv in which a query's or key's element i stands beside element i + dim/2."""
        dim, turned = self.arena.head_dim, self.heads + self.arena.kv_heads
        rows = torch.arange((turned + self.arena.kv_heads) * dim).view(-1, dim)
        rows[:turned] = rows[:turned].view(turned, 2, dim // 2).transpose(1, 2).reshape(turned, dim)
        return rows.flatten()

    def __call__(self, packing: Packing) -> torch.Tensor:
        """Logits [rows, vocabulary] of one packed forward."""
        heads, kv_heads, dim = self.heads, self.arena.kv_heads, self.arena.head_dim
        turned, tokens = heads + kv_heads, len(packing.ids)
        x = F.embedding(packing.ids, self.embedding)
        rotation = self.rotation.index_select(0, packing.positions)
        for index, layer in enumerate(self.layers):
            h = self.norm(x)
            qkv = h @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h, layer.qkv)
            turning = qkv[:, : turned * dim].view(tokens, turned, dim)
            if layer.head_gain is not None:
                turning.copy_(self.head_norm(turning).mul_(layer.head_gain))
            if layer.rotary:
                torch.view_as_complex(turning.view(tokens, turned, -1, 2)).mul_(rotation)
            self.arena.rows[index].index_copy_(0, packing.slots, qkv[:, heads * dim :])
            last = index == len(self.layers) - 1
            if last and not len(packing.rows):
                return self.head.new_empty(0, len(self.head))
            attended = attend(packing, index, qkv, heads, self.scaling, window=layer.window)
            if last and not packing.all_rows_in_order:
                # Nobody reads the other tokens any more: their keys and values are written.
                x, attended = x[packing.rows], attended[packing.rows]
            x = torch.addmm(x, attended, layer.output)
            gate, up = (self.norm(x) @ layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
        return F.linear(self.norm(x).mul_(self.final_gain), self.head)


def _window(attention: Any, config: Any) -> int | None:
    """The window that this layer's own code would hand to its attention."""
    if config.model_type == "llama":
        return None
    window: int | None = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return window


def _norm(
    width: int, eps: float, dtype: torch.dtype, interleaved: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x ↦ x / √(Σx² + width·eps) over the last axis: rms_norm but for √width and the gain, which the weights hold."""
    least = torch.tensor((width * eps) ** 0.5, dtype=dtype)

    def short(x: torch.Tensor) -> torch.Tensor:
        # Two kernels and a division, where rms_norm on a CPU is six kernels.
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), least)

    def exact(x: torch.Tensor) -> torch.Tensor:
        # transformers norms in float32 even in a float64 model; so that float64 gives its very tokens, so does this,
        # down to the order of the sum.
        single = x.float()
        squares = single.pow(2)
        if interleaved:
            squares = squares.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return (single * torch.rsqrt(squares.mean(-1, keepdim=True) + eps)).double() / math.sqrt(width)

    return exact if dtype == torch.float64 else short
