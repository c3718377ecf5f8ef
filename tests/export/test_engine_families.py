"""Every family's graph through the real parser and builder of tensorrt-rtx, which need no GPU: an engine comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.edge.runtimes.tensorrt_steps import Profile
from paceline.export.engine import build_plan

trt = pytest.importorskip(
    "tensorrt_rtx", reason="tensorrt-rtx is not installed (Linux x86-64: pip install -e '.[dev]')"
)
pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from .graph_models import MODELS, make  # noqa: E402  # wants both

CONTEXT = 64
QUICK = (("static-compat", "float16"), ("static-native", "float16"))
LONG = (("static-compat", "float32"), ("static-native", "bfloat16"))
VARIANTS = [name for name, settings in MODELS.items() if "family" in settings]  # of a family that is there already
CELLS = [(name, *kind) for name in MODELS if name not in VARIANTS for kind in QUICK]
REST = [(name, *kind) for name in MODELS for kind in (*QUICK, *LONG) if (name, *kind) not in CELLS]


@pytest.mark.parametrize(
    ("name", "profile", "dtype"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.long) for cell in REST)]
)
def test_an_engine_is_built(name: str, profile: Any, dtype: str, tmp_path: Path) -> None:
    from paceline.export.graph import write

    info = write(make(name), tmp_path, profile, dtype, CONTEXT)
    plan, layers = build_plan(trt, info.path, (Profile(4, 8), Profile(1, 32)))
    if profile == "static-native":
        updates, attentions = layers["KV_CACHE_UPDATE"], layers["ATTENTION_INPUT"]
        assert "SCATTER" not in layers and "SOFTMAX" not in layers
    else:
        updates, attentions = layers["SCATTER"], layers["SOFTMAX"]
        assert "KV_CACHE_UPDATE" not in layers and "ATTENTION_INPUT" not in layers
    assert (updates, attentions, layers["TOPK"]) == (2 * info.layers, info.layers, 1)
    weights = sum((tmp_path / file).stat().st_size for file in info.files)
    assert plan.nbytes > weights  # the weights, and kernels for every GPU that it may meet
    print(f"{name}, {profile} {dtype}: {plan.nbytes / 2**20:.1f} MiB, {updates} updates, {attentions} attentions")
