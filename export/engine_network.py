"""ONNX → TensorRT network: parsed with every problem in words, and looked over before hours of building."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.edge.runtimes.tensorrt_library import logger_of


def parse(trt: Any, builder: Any, path: Path) -> Any:
    """The network of an ONNX file, strongly typed: precisions are the file's own. UserError with each node at fault."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    logger = logger_of(trt)
    logger.errors.clear()
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        problems = [_in_words(parser.get_error(index)) for index in range(parser.num_errors)]
        told = "; ".join(problems or logger.errors) or "no reason was given"
        is_native = "TensorScatter" in told or "Attention" in told
        advice = "; --profile static-native needs TensorRT 10.15, static-compat does not" if is_native else ""
        raise UserError(f"TensorRT {trt.__version__} cannot read {path}: {told}{advice}")
    _check_in_place(network)
    _allow_decomposition(trt, network)
    return network


def layer_counts(network: Any) -> dict[str, int]:
    """Type → how many layers, such as KV_CACHE_UPDATE, SCATTER or ATTENTION_INPUT."""
    return dict(Counter(layer.type.name for layer in _layers(network)))


def _in_words(error: Any) -> str:
    """Node and operator of one of the parser's errors, and what it says."""
    where = f"node {error.node_name()} ({error.node_operator()})" if error.node_operator() else "the file"
    return f"{where}: {error.desc().strip()}"


def _check_in_place(network: Any) -> None:
    """A row is read and written at one address, so nothing but its update may read what it was."""
    caches = {
        name
        for name in (network.get_input(index).name for index in range(network.num_inputs))
        if name.startswith(("key.", "value."))
    }
    for layer in _layers(network):
        for index in range(layer.num_inputs):
            tensor = layer.get_input(index)
            if tensor is None or tensor.name not in caches:
                continue
            if layer.type.name not in ("SCATTER", "KV_CACHE_UPDATE", "SHAPE"):
                raise UserError(f"the graph reads {tensor.name} in {layer.name}, before it is updated: not in place")


def _allow_decomposition(trt: Any, network: Any) -> None:
    """Lets an attention without a kernel of its own, such as one in float32, become several."""
    for layer in _layers(network):
        if layer.type.name == "ATTENTION_INPUT":
            layer.__class__ = trt.IAttentionInputLayer  # get_layer gives plain ILayers
            entrance = layer
            attention = entrance.attention
            attention.decomposable = True


def _layers(network: Any) -> Iterator[Any]:
    return (network.get_layer(index) for index in range(network.num_layers))
