"""What a drafter's bundle and its runtime have to do with each other in a topology."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.topology.spec_errors import Finding
from paceline.topology.spec_models import DrafterSpec, Topology


def with_manifests(topology: Topology) -> Topology:
    """The topology with what the manifest of each bundle that is here says, wherever the file says nothing."""
    return topology.model_copy(update={"drafters": tuple(_with_manifest(drafter) for drafter in topology.drafters)})


def _with_manifest(drafter: DrafterSpec) -> DrafterSpec:
    if drafter.model is None or not manifests.is_bundle(Path(drafter.model)):
        return drafter
    try:
        manifest = manifests.read(Path(drafter.model))
    except UserError:  # the drafter itself says what is wrong with it; its targets go on without it
        return drafter
    says: dict[str, object] = {"runtime": manifest.runtime}
    if manifest.runtime == "torch":
        says["max_context"] = min(manifest.max_context, drafter.max_context)
    else:  # the rows of a graph are as long as they are
        says |= {"max_context": manifest.max_context, "max_sessions": manifest.max_sessions}
    return drafter.model_copy(update={key: say for key, say in says.items() if key not in drafter.model_fields_set})


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
