"""Every family's graph through the real parser and builder of tensorrt-rtx, which need no GPU: an engine comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.edge.runtimes.tensorrt_steps import Profile
from paceline.export.engine import build_plan

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (Linux x86-64: pip install -e '.[dev]')")
pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

CONTEXT = 64
BUILT = (("static-compat", "float16"), ("static-compat", "float32"), ("static-native", "float16"))


def families() -> list[str]:
    from .graph_models import MODELS

    return list(MODELS)


@pytest.mark.parametrize(("profile", "dtype"), BUILT)
@pytest.mark.parametrize("name", families())
def test_an_engine_is_built(name: str, profile: Any, dtype: str, tmp_path: Path, record_property: Any) -> None:
    from paceline.export.graph import write

    from .graph_models import make

    info = write(make(name), tmp_path, profile, dtype, CONTEXT)
    plan, layers = build_plan(trt, info.path, (Profile(4, 8), Profile(1, 32)))
    if profile == "static-native":
        assert layers["KV_CACHE_UPDATE"] == 2 * info.layers
        assert layers["ATTENTION_INPUT"] == layers["ATTENTION_OUTPUT"] == info.layers
        assert "SCATTER" not in layers and "SOFTMAX" not in layers
    else:
        assert layers["SCATTER"] == 2 * info.layers
        assert layers["SOFTMAX"] == info.layers
        assert "KV_CACHE_UPDATE" not in layers and "ATTENTION_INPUT" not in layers
    assert layers["TOPK"] == 1
    weights = sum((tmp_path / file).stat().st_size for file in info.files)
    assert plan.nbytes > weights  # the weights, and kernels for every GPU that it may meet
    record_property("engine_bytes", plan.nbytes)
    print(f"{name} {profile} {dtype}: {plan.nbytes} bytes, {info.layers} layers, {layers}")
