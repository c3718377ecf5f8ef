"""The TensorRT of this machine: its module, its one logger, and the key of the engines that run here.

An engine runs only where it was built: same TensorRT, same GPU architecture, same JetPack, same graph. Engines of
`tensorrt_rtx` are the exception: they are finished on the GPU that loads them, so their key names none.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from paceline.core.errors import UserError
from paceline.core.manifest import Manifest

log = logging.getLogger(__name__)

Library = Literal["tensorrt", "tensorrt_rtx"]
LIBRARIES: tuple[Library, ...] = get_args(Library)
OLDEST = (10, 3)  # the first with everything that is called here; JetPack 6.2 has it
ANY_GPU = "any"
TEGRA_RELEASE = Path("/etc/nv_tegra_release")


class EngineKey(NamedTuple):
    """Where an engine runs. system: such as l4t-36.4.3, empty where there is no JetPack."""

    library: str
    version: str
    gpu: str  # such as sm_87
    system: str
    graph: str  # the first half of a SHA-256 over the graph's files

    @property
    def file_name(self) -> str:
        return "-".join(part for part in self[:4] if part) + ".plan"

    def __str__(self) -> str:
        return ", ".join(part for part in (f"{self.library} {self.version}", self.gpu, self.system) if part)


def import_library(name: Library) -> Any:
    """The module. UserError when it is not here, does not load, or is too old."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if name == "tensorrt" and importlib.util.find_spec(name) is None and importlib.util.find_spec("tensorrt_rtx"):
            raise UserError(f"tensorrt is not installed here, but tensorrt_rtx is: {_THE_OTHER}") from None
        raise UserError(f"{name} cannot be imported, {error}: {_HOW_TO_GET[name]}") from None
    if name == "tensorrt" and _numbers(module.__version__) < OLDEST:
        raise UserError(f"TensorRT {module.__version__} is too old: 10.3 or newer is needed, as in JetPack 6.2")
    return module


def library_of(manifest: Manifest) -> Library:
    """Which TensorRT the bundle's engines are of; where there are none, or several kinds, the first that is here."""
    built = {str(entry.get("library")) for entry in manifest.engines.values()}
    wanted = [name for name in LIBRARIES if name in built] or list(LIBRARIES)
    return next((name for name in wanted if importlib.util.find_spec(name)), wanted[0])


def device_index(device: str) -> int:
    """cuda → 0, cuda:1 → 1. UserError for what is no GPU."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        raise UserError(f"TensorRT runs on a GPU, not on device {device}: write device: cuda:0")
    return int(index or 0)


def key_here(name: Library, version: str, architecture: str, graph: str, release: Path = TEGRA_RELEASE) -> EngineKey:
    """The key of an engine that is built on this machine, or would run on it."""
    if name == "tensorrt_rtx":
        return EngineKey(name, version, ANY_GPU, "", graph)
    return EngineKey(name, version, architecture, jetpack(release), graph)


def jetpack(release: Path = TEGRA_RELEASE) -> str:
    """The Jetson Linux release, such as l4t-36.4.3; empty on other machines."""
    try:
        text = release.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)", text)
    return f"l4t-{found[1]}.{found[2]}" if found else ""


def graph_checksum(manifest: Manifest) -> str:
    """Hex, over model.onnx and its external data as the manifest lists them."""
    files = sorted(name for name in manifest.files if name.endswith((".onnx", ".data")))
    lines = "".join(f"{name}:{manifest.files[name]}\n" for name in files)
    return hashlib.sha256(lines.encode()).hexdigest()[:32]


def key_of(entry: dict[str, str | int]) -> EngineKey:
    """The key in a manifest's engine entry; what an entry lacks is empty, and so fits nowhere."""
    return EngineKey(*(str(entry.get(field, "")) for field in EngineKey._fields))


def find_engine(folder: Path, manifest: Manifest, here: EngineKey) -> Path:
    """The bundle's engine for this machine. UserError with the command that builds one."""
    keys = {name: key_of(entry) for name, entry in manifest.engines.items()}
    for name, key in keys.items():
        if key == here:
            return folder / name
    build = f"build one here: {build_command(folder, here.library)}"
    if not keys:
        raise UserError(f"{folder} has no TensorRT engine yet; {build}")
    if any(key[:4] == here[:4] for key in keys.values()):
        raise UserError(f"{folder} has an engine of another graph than its model.onnx; {build}")
    others = "; ".join(str(key) for key in keys.values())
    raise UserError(f"{folder} has no engine for {here}, only for {others}, and engines run nowhere else; {build}")


def build_command(folder: Path, library: str) -> str:
    """What to type for an engine of this machine."""
    return f"paceline engine {folder}" + ("" if library == "tensorrt" else f" --library {library}")


@cache
def logger_of(trt: Any) -> Any:
    """TensorRT's logger: it keeps the first it is given for the whole process, so there is one.

    Its `errors` collects what went wrong since it was last emptied; warnings go to the log.
    """

    class Logger(trt.ILogger):  # type: ignore[misc]  # has no type
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message.strip())
            elif severity == trt.ILogger.Severity.WARNING:
                log.debug("%s: %s", trt.__name__, message.strip())

    return Logger()


_HOW_TO_GET: dict[Library, str] = {
    "tensorrt": "a Jetson has it with JetPack, and a venv there needs --system-site-packages; elsewhere"
    " pip install tensorrt, or tensorrt-rtx for an RTX card",
    "tensorrt_rtx": "pip install tensorrt-rtx",
}
_THE_OTHER = "build and run engines with --library tensorrt_rtx, or pip install tensorrt"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
