"""Writing an ONNX graph node by node; weights go straight to the external file, so a model is never held twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

ALIGNMENT = 65536  # offsets that every platform can map into memory
INLINE = 1024  # bytes; what is smaller stays in model.onnx, where tools look for shapes and constants
IR_VERSION = {18: 8, 24: 12}  # the oldest that has the opset: old parsers refuse newer ones
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
SINGLE = TensorProto.FLOAT


class Nodes:
    """A graph in the making; `with` it, or the file of weights stays open.

    path: of model.onnx; the weights go to the same name with `.data`. dtype: of weights, KV and matrix products.
    fused: operators of ONNX Runtime's own may be used.
    """

    def __init__(self, path: Path, dtype: str, opset: int, fused: bool) -> None:
        self.path, self.opset, self.fused = path, opset, fused
        self.dtype = TYPES[dtype]
        self.numpy_dtype = helper.tensor_dtype_to_np_dtype(self.dtype)
        self.ir_version = IR_VERSION[opset]
        self.least_onnxruntime = "1.20"
        self.scope = ""  # a prefix of names, for people who read the graph and parsers' complaints
        self._data = path.with_name(path.name + ".data").open("wb")
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._domains: set[str] = set()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()

    def input(self, name: str, dtype: int, shape: Sequence[str | int]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[str | int]) -> None:
        """Declares an output that an op was told to make (`named`)."""
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def op(self, kind: str, *inputs: str, domain: str = "", named: str | None = None, **attributes: Any) -> str:
        """Adds a node with one output and returns the output's name."""
        return self.ops(kind, 1, *inputs, domain=domain, named=None if named is None else (named,), **attributes)[0]

    def ops(
        self,
        kind: str,
        count: int,
        *inputs: str,
        domain: str = "",
        named: Sequence[str] | None = None,
        **attributes: Any,
    ) -> list[str]:
        """Adds a node with `count` outputs and returns their names; an empty input is one left out."""
        name = f"{self.scope}{kind}_{len(self._nodes)}"
        outputs = list(named) if named else [name] if count == 1 else [f"{name}.{i}" for i in range(count)]
        self._nodes.append(helper.make_node(kind, inputs, outputs, name=name, domain=domain, **attributes))
        self._domains.add(domain)
        return outputs

    @contextmanager
    def at(self, scope: str) -> Iterator[None]:
        """Names made inside begin with `scope`."""
        before, self.scope = self.scope, scope
        yield
        self.scope = before

    def constant(self, values: Any, dtype: type[np.generic] | np.dtype[Any] = np.int64) -> str:
        """A small constant; equal ones are one."""
        array = np.asarray(values, dtype)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._initializer(f"constant_{len(self._constants)}", array)
        return self._constants[key]

    def weight(self, name: str, values: NDArray[Any], dtype: int | None = None) -> str:
        """A weight, in the graph's own dtype unless told another."""
        array = np.ascontiguousarray(values, helper.tensor_dtype_to_np_dtype(dtype or self.dtype))
        return self._initializer(self.scope + name, array)

    def single(self, value: str) -> str:
        """`value` of the graph's dtype, in float32."""
        return value if self.dtype == SINGLE else self.op("Cast", value, to=SINGLE)

    def narrow(self, value: str) -> str:
        """float32 `value` in the graph's dtype."""
        return value if self.dtype == SINGLE else self.op("Cast", value, to=self.dtype)

    def save(self, producer_version: str) -> None:
        """Writes model.onnx. The weights are on disk already."""
        graph = helper.make_graph(self._nodes, "decoder", self._inputs, self._outputs, self._initializers)
        opsets = [helper.make_opsetid(d, 1 if d else self.opset) for d in sorted(self._domains | {""})]
        model = helper.make_model(
            graph,
            opset_imports=opsets,
            ir_version=self.ir_version,
            producer_name="paceline",
            producer_version=producer_version,
        )
        self._data.flush()
        onnx.save_model(model, self.path)

    def _initializer(self, name: str, array: NDArray[Any]) -> str:
        tensor = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
        if array.nbytes < INLINE:
            tensor.raw_data = array.tobytes()
        else:
            self._data.seek(-(-self._data.tell() // ALIGNMENT) * ALIGNMENT)
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": Path(self._data.name).name, "offset": self._data.tell(), "length": array.nbytes}
            tensor.external_data.extend(onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in place.items())
            array.view(np.uint8).tofile(self._data)
        self._initializers.append(tensor)
        return name
