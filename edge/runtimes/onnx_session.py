"""An ONNX Runtime session on the device that was asked for, or the reason why there is none: never on another."""

from __future__ import annotations

import contextlib
import ctypes
import io
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.core.extras import install

CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"
_LIBRARIES = {CUDA: "libonnxruntime_providers_cuda.so", TENSORRT: "libonnxruntime_providers_tensorrt.so"}


def open_session(graph: Path, *, device: str = "cpu", provider: str | None = None, threads: int | None = None) -> Any:
    """An `onnxruntime.InferenceSession` over a graph file.

    device: cpu, cuda or cuda:N. provider: cuda or tensorrt, on a CUDA device; default cuda. threads: of one step;
    default: ONNX Runtime's own choice, a core each. UserError when the package, the provider or a library that it needs
    is missing, or the graph is none.
    """
    onnxruntime = _import()
    wanted = _providers(device, provider)
    first = wanted[0][0]
    if first not in onnxruntime.get_available_providers():
        raise UserError(
            f"device {device} needs {first}, which the installed onnxruntime {onnxruntime.__version__} lacks: "
            f"pip uninstall onnxruntime, then {install('gpu')}"
        )
    if first != CPU:
        _check_libraries(onnxruntime, first)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    # Between a drafter's steps there are pauses; threads that spin through them take the cores of whoever is next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(graph, options, providers=wanted, enable_fallback=0)
    except Exception as error:  # the package's exceptions have no common root but this
        raise UserError(f"onnxruntime cannot load {graph} for {device}: {first_line(error)}") from error
    got = session.get_providers()
    if got[: len(wanted)] != [name for name, _ in wanted]:
        raise UserError(
            f"device {device} needs {first}, but onnxruntime runs this graph on {', '.join(got)} only; "
            "what it printed above says why"
        )
    return session


def _import() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise UserError(
            f"runtime onnxruntime needs the package of that name ({error}): {install('onnxruntime')}"
        ) from None
    return onnxruntime


def device_index(device: str) -> int:
    """0 for cpu and cuda, N for cuda:N."""
    return int(device.partition(":")[2] or 0)


def _providers(device: str, provider: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Best first. The CPU stays as the last one: small integer work of a graph belongs there."""
    if device == "cpu":
        if provider is not None:
            raise UserError(f"provider {provider} runs on a GPU: write device: cuda, or leave provider out")
        return [(CPU, {})]
    cuda = (CUDA, {"device_id": device_index(device)})
    if provider == "tensorrt":
        return [(TENSORRT, {"device_id": device_index(device)}), cuda, (CPU, {})]
    return [cuda, (CPU, {})]


def _check_libraries(onnxruntime: Any, provider: str) -> None:
    """A provider whose libraries are missing is available by name, and onnxruntime goes on without it.

    UserError names the library.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find, also where it is not needed
        onnxruntime.preload_dlls()
    path = Path(onnxruntime.__file__).parent / "capi" / _LIBRARIES[provider]
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        if "cannot open shared object file" in str(error):
            missing, version = str(error).partition(":")[0], getattr(onnxruntime, "cuda_version", "")
            needs = [
                "NVIDIA's driver",
                f"CUDA {version}".strip(),
                "cuDNN",
                *(["TensorRT"] if provider == TENSORRT else []),
            ]
            raise UserError(
                f"{provider} cannot be used: {missing} is not found; onnxruntime {onnxruntime.__version__} needs "
                f"{', '.join(needs)}; install what is missing, or use device: cpu"
            ) from None
        # Whatever else is wrong with it shows when it makes a session.


def first_line(error: Exception) -> str:
    """What an exception of the package says first; more lines of it are of no use to a user."""
    return str(error).strip().splitlines()[0]
