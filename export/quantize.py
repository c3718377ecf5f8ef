"""Weights of a float32 graph in 8 or 4 bits, for ONNX Runtime.

Matrix products become MatMulNBits: weights in blocks with a scale each, symmetric, multiplied as integers (accuracy
level 4 quantises the other factor on the fly). On a CPU a token costs about what reading the weights costs, so a
drafter gains nearly what they shrink by. Two weights are treated apart:

- the head's stays at 8 bits in `int4`, too: it decides between tokens, and is a large part of a small drafter;
- the embedding is 8 bits a value with a scale for each token: looking rows up gains no time, but it is often the
  largest file of a bundle.

Norms, biases and rope tables stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from paceline.core.manifest import Quantization

# Values that share a scale, of weights and of what they are multiplied with. With 128, 8 bits are a sixth quicker, but
# next to a large activation the others in its block lose: 94 % of SmolLM2-135M's proposals stay then, with 32 96 %.
BLOCK = 32
INTEGER_PRODUCTS = 4  # MatMulNBits' accuracy_level
EMBEDDING = "embedding"  # what the graph calls it
INLINE = 1024  # bytes; what is smaller stays in the graph's own file


def quantize(source: Path, target: Path, kind: Quantization) -> None:
    """Writes the graph of `source` with quantised weights to `target`, its data beside it.

    source: model.onnx of a float32 graph. The whole model is held in memory once or twice.
    """
    model = onnx.load(source)
    graph = model.graph
    _give_the_head_its_weight(graph)
    _quantize_the_embedding(graph)
    products = [node.name for node in graph.node if node.op_type == "MatMul"]
    if kind == "int4":
        model = _products(model, 4, exclude=products[-1:])  # the last one is the head's
    model = _products(model, 8, exclude=[])
    target.with_name(target.name + ".data").unlink(missing_ok=True)
    onnx.save_model(model, target, save_as_external_data=True, location=target.name + ".data", size_threshold=INLINE)


def _products(model: onnx.ModelProto, bits: int, exclude: list[str]) -> onnx.ModelProto:
    """All products with a weight but these."""
    with _quiet():
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

        config = DefaultWeightOnlyQuantConfig(
            block_size=BLOCK, is_symmetric=True, accuracy_level=INTEGER_PRODUCTS, bits=bits
        )
        quantizer = MatMulNBitsQuantizer(model, algo_config=config, nodes_to_exclude=exclude)
        quantizer.process()
    quantized: onnx.ModelProto = quantizer.model.model
    return quantized


def _give_the_head_its_weight(graph: onnx.GraphProto) -> None:
    """A head that is the embedding, transposed in the graph, gets a copy: its blocks run along the other axis."""
    for node in graph.node:
        if node.op_type == "Transpose" and node.input[0] == EMBEDDING:
            values = numpy_helper.to_array(_weight(graph, EMBEDDING))
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values.T), node.output[0]))
            graph.node.remove(node)
            return


def _quantize_the_embedding(graph: onnx.GraphProto) -> None:
    """The lookup of float rows becomes one of int8 rows, times the row's scale."""
    table = _weight(graph, EMBEDDING)
    values = numpy_helper.to_array(table)
    scales = np.maximum(np.abs(values).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / 127
    graph.initializer.remove(table)
    graph.initializer.append(numpy_helper.from_array(np.rint(values / scales).astype(np.int8), f"{EMBEDDING}.int8"))
    graph.initializer.append(numpy_helper.from_array(scales.astype(np.float32), f"{EMBEDDING}.scale"))
    place, lookup = next((i, node) for i, node in enumerate(graph.node) if node.input[:1] == [EMBEDDING])
    ids, output = lookup.input[1], lookup.output[0]
    graph.node.remove(lookup)
    for node in (  # the last one ends up first
        helper.make_node("Mul", ["embedding/values", "embedding/scales"], [output], "embedding/Mul"),
        helper.make_node("Gather", [f"{EMBEDDING}.scale", ids], ["embedding/scales"], "embedding/scales", axis=0),
        helper.make_node("Cast", ["embedding/rows"], ["embedding/values"], "embedding/Cast", to=TensorProto.FLOAT),
        helper.make_node("Gather", [f"{EMBEDDING}.int8", ids], ["embedding/rows"], "embedding/rows", axis=0),
    ):
        graph.node.insert(place, node)


def _weight(graph: onnx.GraphProto, name: str) -> TensorProto:
    weights = {weight.name: weight for weight in graph.initializer}
    found: TensorProto = weights[name]
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Importing the quantizer sets up logging for the whole process, and it reports each product: neither is wanted."""
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)
