"""What a drafter's bundle and its runtime have to do with each other in a topology."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.topology.spec_errors import Finding
from paceline.topology.spec_models import DrafterSpec, Topology


def with_runtimes(topology: Topology) -> Topology:
    """The topology with the runtime of each bundle that is here, wherever the file names none."""
    return topology.model_copy(update={"drafters": tuple(_with_runtime(drafter) for drafter in topology.drafters)})


def _with_runtime(drafter: DrafterSpec) -> DrafterSpec:
    if drafter.model is None or "runtime" in drafter.model_fields_set or not manifests.is_bundle(Path(drafter.model)):
        return drafter
    try:
        runtime = manifests.read(Path(drafter.model)).runtime
    except UserError:  # the drafter itself says what is wrong with it; its targets go on without it
        return drafter
    return drafter.model_copy(update={"runtime": runtime})


def providers(drafters: dict[int, DrafterSpec]) -> Iterator[Finding]:
    """A provider is ONNX Runtime's, and of a GPU."""
    for index, drafter in drafters.items():
        if drafter.provider is None:
            continue
        path = ("drafters", index, "provider")
        if "runtime" in drafter.model_fields_set and drafter.runtime != "onnxruntime":
            yield Finding(path, f"is only for runtime: onnxruntime, not {drafter.runtime}", at_key=True)
        elif drafter.device == "cpu":
            yield Finding(path, "runs on a GPU: write device: cuda:0, or remove it", at_key=True)


def graphics(drafters: dict[int, DrafterSpec]) -> Iterator[Finding]:
    """TensorRT has no CPU."""
    for index, drafter in drafters.items():
        if drafter.runtime == "tensorrt" and drafter.device == "cpu":
            yield Finding(("drafters", index, "runtime"), "tensorrt runs on a GPU: write device: cuda:0 beside it")
