"""What a node's bundle, its runtime and what a topology asks of them have to do with each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.core import manifest as manifests
from paceline.core.errors import UserError
from paceline.topology.spec_errors import Finding
from paceline.topology.spec_models import DrafterSpec, TargetSpec, Topology
from paceline.topology.yaml_lines import Path as YamlPath

DRAFTS_AHEAD = "a draft_model on torch, emulated, or onnxruntime with a graph of profile concat"


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


def bundles(
    drafters: Mapping[int, DrafterSpec], targets: Mapping[int, TargetSpec], hosts: Collection[str] = ()
) -> Iterator[Finding]:
    """Models that nodes of this machine could not load: no bundles, or made for something else.

    hosts: those that this machine is. By manifests alone; models that are absent are told elsewhere.
    """
    for index, drafter in drafters.items():
        if (drafter.host is None or drafter.host in hosts) and drafter.strategy == "draft_model" and drafter.model:
            yield from _of_drafter(index, drafter, Path(drafter.model))
    for index, target in targets.items():
        folder = Path(target.model)
        if target.engine != "torch" or not (target.host is None or target.host in hosts):
            continue
        if folder.is_file() or manifests.is_bundle(folder):
            asked = {"role": "target", "runtime": "torch", "max_context": target.max_context}
            yield from _misfits(("targets", index), folder, asked)


def _of_drafter(index: int, drafter: DrafterSpec, folder: Path) -> Iterator[Finding]:
    if drafter.runtime == "emulated" or (folder.is_absolute() and not folder.exists()):
        return
    if drafter.runtime == "torch" and not (manifests.is_bundle(folder) or folder.is_file()):
        return
    resolved = _with_manifest(drafter)
    yield from providers({index: resolved})
    yield from graphics({index: resolved})
    asked = {
        "role": "drafter",
        "runtime": resolved.runtime,
        "max_context": resolved.max_context,
        "max_sessions": resolved.max_sessions,
        "device": resolved.device,
    }
    yield from _misfits(("drafters", index), folder, asked)


def _misfits(node: YamlPath, folder: Path, asked: dict[str, Any]) -> Iterator[Finding]:
    try:
        manifest = manifests.read(folder)
    except UserError as error:
        yield Finding((*node, "model"), str(error))
        return
    for key, message in manifests.misfits(manifest, folder, **asked):
        yield Finding((*node, key), message)


def ahead(drafters: Mapping[int, DrafterSpec], targets: Mapping[int, TargetSpec]) -> Iterator[Finding]:
    """draft_ahead where no drafter of the target can."""
    by_name = {drafter.name: _with_manifest(drafter) for drafter in drafters.values()}
    for index, target in targets.items():
        names = target.drafters.names
        if not target.draft_ahead or not names or not set(names) <= set(by_name):
            continue
        if not any(drafts_ahead(by_name[name]) for name in names):
            none = f"{names[0]} cannot" if len(names) == 1 else f"none of {', '.join(names)} can"
            message = f"{none} draft ahead, which takes {DRAFTS_AHEAD}; remove it"
            yield Finding(("targets", index, "draft_ahead"), message)


def drafts_ahead(drafter: DrafterSpec) -> bool:
    """Whether its runtime copies KV between sessions; True where that is not known, as of a graph that is elsewhere."""
    if drafter.strategy != "draft_model" or drafter.runtime == "tensorrt":
        return False
    if drafter.runtime != "onnxruntime" or drafter.model is None or not manifests.is_bundle(Path(drafter.model)):
        return True
    try:
        return manifests.read(Path(drafter.model)).profile == "concat"
    except UserError:
        return True


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
