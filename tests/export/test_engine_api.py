"""Every name of TensorRT and cuda-bindings that is used exists in the versions that Jetsons and desktops have.

The real bindings are installed into a folder each and looked at in a process of their own; TensorRT's import wants its
libraries, of which a few empty functions stand in. The names are read from the source, so the list cannot get stale.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What each variable is, file by file.
TENSORRT: dict[str, dict[str, str]] = {
    "edge/runtimes/tensorrt_library.py": {"trt": ""},
    "edge/runtimes/tensorrt_engine.py": {
        "trt": "", "engine": "ICudaEngine", "runtime": "Runtime", "context": "IExecutionContext"
    },
    "export/engine.py": {"trt": "", "builder": "Builder", "config": "IBuilderConfig"},
    "export/engine_network.py": {
        "trt": "", "builder": "Builder", "network": "INetworkDefinition", "parser": "OnnxParser",
        "error": "ParserError", "layer": "ILayer", "tensor": "ITensor", "entrance": "IAttentionInputLayer",
        "attention": "IAttention",
    },
    "export/engine_config.py": {
        "trt": "", "builder": "Builder", "config": "IBuilderConfig", "network": "INetworkDefinition",
        "tensor": "ITensor", "profile": "IOptimizationProfile", "cache": "ITimingCache",
    },
}  # fmt: skip
CUDA = {"edge/runtimes/cuda.py": {"cuda": ""}}
# Only reached with layers that TensorRT has since 10.15.
SINCE_10_15 = {"IAttentionInputLayer", "IAttentionInputLayer.attention", "IAttention.decomposable"}
LAYERS = {"LayerType.SCATTER", "LayerType.SHAPE"}
LAYERS_SINCE_10_15 = {"LayerType.KV_CACHE_UPDATE", "LayerType.ATTENTION_INPUT"}
VERSIONS = {  # JetPack 6.2 has 10.3, 7.2 has 10.16
    "10.3.0": "tensorrt-cu12-bindings==10.3.0",
    "10.16.1": "tensorrt-cu13-bindings==10.16.1.11",
    "11.4.0": "tensorrt-cu13-bindings==11.4.0.106",
}
CUDA_VERSIONS = {"12.8": "cuda-bindings==12.8.0", "13.5": "cuda-bindings==13.5.0"}
FUNCTIONS = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion",
    "getBuilderPluginRegistry", "getPluginRegistry", "initLibNvInferPlugins",
)  # fmt: skip
LOOK = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
missing = []
for name in json.load(sys.stdin):
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            missing.append(name)
            break
print(json.dumps([module.__version__ if hasattr(module, "__version__") else "", missing]))
"""


def used_names(variables: dict[str, dict[str, str]]) -> dict[str, set[str]]:
    """Variable of a file → the dotted names that are used of it, such as Builder.create_network."""
    found: dict[str, set[str]] = {}
    for file, classes in variables.items():
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            chain: list[str] = []
            while isinstance(node, ast.Attribute):
                chain.insert(0, node.attr)
                node = node.value
            if not chain:
                continue
            if isinstance(node, ast.Name) and node.id == "self" and len(chain) > 1:
                variable, chain = chain[0].lstrip("_"), chain[1:]
            elif isinstance(node, ast.Name):
                variable = node.id
            else:
                continue
            if variable in classes and not chain[0].startswith("__"):
                owner = classes[variable]
                name = f"{owner}.{chain[0]}" if owner else ".".join(chain)
                found.setdefault(f"{file}:{variable}", set()).add(name)
    return found


def names_of(variables: dict[str, dict[str, str]]) -> set[str]:
    return set().union(*used_names(variables).values())


def installed(requirement: str, folder: Path) -> Path:
    """The folder with that package in it; skips, with pip's reason, where it cannot be had."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--only-binary=:all:", "--target", str(folder), requirement]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"{requirement} cannot be installed for this Python: {done.stderr.strip().splitlines()[-1]}")
    return folder


def missing_of(module: str, names: set[str], folder: Path, libraries: Path | None = None) -> tuple[str, list[str]]:
    """(version, the names that it lacks) of a module in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    if libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    done = subprocess.run(
        [sys.executable, "-c", LOOK, module],
        input=json.dumps(sorted(names)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    version, missing = json.loads(done.stdout)
    return version, missing


def stand_ins(folder: Path, major: str) -> Path:
    """Empty libraries with the names and functions that TensorRT's bindings are linked with."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler: apt install gcc")
    folder.mkdir()
    source = folder / "stand_ins.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
    for library in ("nvinfer", "nvonnxparser", "nvinfer_plugin"):
        name = f"lib{library}.so.{major}"
        subprocess.run(
            [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)], check=True
        )
    return folder


@pytest.mark.integration
@pytest.mark.parametrize("version", VERSIONS)
def test_tensorrt_has_every_name(version: str, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("the bindings are Linux's")
    folder = installed(VERSIONS[version], tmp_path / "bindings")
    libraries = stand_ins(tmp_path / "libraries", version.split(".")[0])
    is_old = version.startswith("10.3")
    names = names_of(TENSORRT) | LAYERS | LAYERS_SINCE_10_15
    found, missing = missing_of("tensorrt_bindings", names, folder, libraries)
    assert found.startswith(version)
    assert set(missing) == (SINCE_10_15 | LAYERS_SINCE_10_15 if is_old else set())


@pytest.mark.integration
@pytest.mark.parametrize("version", CUDA_VERSIONS)
def test_cuda_bindings_have_every_name(version: str, tmp_path: Path) -> None:
    folder = installed(CUDA_VERSIONS[version], tmp_path)
    names = names_of(CUDA)
    assert len(names) > 25 and "cudaStreamBeginCapture" in names
    assert missing_of("cuda.bindings.runtime", names, folder)[1] == []
    assert missing_of("cuda.bindings", {"__version__"}, folder)[0].startswith(version)


def test_tensorrt_rtx_has_every_name() -> None:
    pytest.importorskip("tensorrt_rtx")
    _, missing = missing_of("tensorrt_rtx", names_of(TENSORRT) | LAYERS | LAYERS_SINCE_10_15, ROOT)
    assert missing == []


def test_each_variable_that_is_listed_is_used() -> None:
    used = used_names(TENSORRT)
    assert set(used) == {f"{file}:{variable}" for file, classes in TENSORRT.items() for variable in classes}
    assert {"NetworkDefinitionCreationFlag.STRONGLY_TYPED", "IExecutionContext.execute_async_v3"} <= names_of(TENSORRT)
    assert len(names_of(TENSORRT)) > 50
