"""Folders of small random models with a tokenizer, to be exported whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .graph_models import make

onnxruntime = pytest.importorskip("onnxruntime")
VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
RUNS_OPSET_24 = VERSION >= (1, 25)  # Python 3.10 has an older one
TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "tiny-drafter" / "tokenizer.json"


def need(profile: str) -> None:
    """Skips a test of static-native where onnxruntime knows neither TensorScatter nor Attention."""
    if profile == "static-native" and not RUNS_OPSET_24:
        pytest.skip(f"onnxruntime {onnxruntime.__version__} does not run opset 24; 1.25 does")


def model_folder(folder: Path, family: str = "llama", **settings: Any) -> Path:
    """A model with the embedded pair's tokenizer, whose 2 048 ids are followed by a padded tail."""
    sizes = {"vocab_size": 2056, "num_hidden_layers": 3, "max_position_embeddings": 512, **settings}
    make(family, **sizes).save_pretrained(folder)
    shutil.copy(TOKENIZER, folder)
    return folder


def edit_weight(graph: Path, name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Changes one initializer of a graph, as a mistake in writing it would have."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(graph)  # with its external data
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(values.copy()), values.dtype), name))
    onnx.save_model(model, graph.with_name("edited.onnx"))
    graph.with_name("edited.onnx").replace(graph)
