"""A topology file: read, checked as a whole, and explained when it is wrong.

`load_topology` is the only way in. It either gives a Topology that can be run as written or raises
SpecErrors with every problem at once. Reading goes in five steps: YAML with positions → sections and values
(spec_models) → what must fit together (spec_checks) → what this version cannot do yet → key files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.core.errors import UserError
from paceline.topology import yaml_lines
from paceline.topology.key_checks import key_files
from paceline.topology.spec_bundles import ahead, bundles, with_manifests
from paceline.topology.spec_checks import Parts, cross_check, missing_models, same_language, unsupported
from paceline.topology.spec_errors import Finding, Problem, SpecErrors, dotted, located
from paceline.topology.spec_models import (
    Api,
    DraftersOf,
    DrafterSpec,
    Host,
    LinkSpec,
    Profile,
    Section,
    Security,
    TargetSpec,
    Topology,
    with_addresses,
)
from paceline.topology.spec_values import Address, did_you_mean, listed, shown

__all__ = [
    "Address",
    "Api",
    "DrafterSpec",
    "DraftersOf",
    "Host",
    "LinkSpec",
    "Problem",
    "Profile",
    "Security",
    "SpecErrors",
    "TargetSpec",
    "Topology",
    "load_topology",
    "missing_models",
    "parse_topology",
    "require_models",
    "schema",
    "unsupported",
]

MAXIMUM_BYTES = 1 << 18
_SECTIONS: dict[tuple[str, ...], type[Section]] = {
    (): Topology,
    ("security",): Security,
    ("link",): LinkSpec,
    ("hosts",): Host,
    ("drafters",): DrafterSpec,
    ("drafters", "profile"): Profile,
    ("targets",): TargetSpec,
    ("targets", "profile"): Profile,
    ("targets", "drafters"): DraftersOf,
    ("targets", "api"): Api,
}


def load_topology(path: Path | str, *, look_at_keys: bool = True, look_at_bundles: bool = True) -> Topology:
    """Reads and checks a topology file. Raises SpecErrors with all problems, or UserError when it cannot be read.

    look_at_keys: False for who is about to make the keys and certificates that it names.
    look_at_bundles: False for a node: it finds out about its own, and goes on where another's is wrong.
    """
    looks = {"look_at_keys": look_at_keys, "look_at_bundles": look_at_bundles}
    return parse_topology(read_text(Path(path)), str(path), Path(path).parent, **looks)


def parse_topology(
    text: str, file: str, base: Path, *, look_at_keys: bool = True, look_at_bundles: bool = True
) -> Topology:
    """A topology out of text. file: what messages call it; base: what relative paths are relative to."""
    base = base.absolute()
    document = yaml_lines.read_yaml(text)
    if document.problems:
        raise SpecErrors(_yaml_problem(problem, file) for problem in document.problems)
    problems: list[Problem] = []
    data = _with_profiles(document, file, base, problems)
    topology, findings = _validate(data, base)
    parts = replace(Parts.of(topology) if topology else _salvage(data, findings, base), file=file)
    findings += [*cross_check(parts), *unsupported(parts)]
    if look_at_keys:
        findings += key_files(parts, file)
    if look_at_bundles:
        findings += [*bundles(parts.drafters, parts.targets), *ahead(parts.drafters, parts.targets)]
    if not findings and not problems:
        findings += same_language(parts)
    problems += [located(finding, document, file) for finding in findings]
    if problems or topology is None:
        raise SpecErrors(problems)
    topology = with_manifests(topology)
    topology._file = file
    return topology


def require_models(topology: Topology, file: str) -> None:
    """Raises UserError when a local model that this machine needs is not there."""
    missing = missing_models(topology)
    if missing:
        raise UserError("\n".join(f"{file}: {dotted(finding.path)}: {finding.message}" for finding in missing))


def schema() -> dict[str, Any]:
    """The JSON Schema of a topology file, for editors."""
    result = Topology.model_json_schema(mode="validation")
    for name, key in (("DrafterSpec", "listen"), ("Api", "listen"), ("TargetSpec", "api")):
        result["$defs"][name]["required"].remove(key)  # what is left out gets its default before validation
    for name in ("DrafterSpec", "TargetSpec"):
        result["$defs"][name]["properties"]["profile"]["anyOf"].append({"type": "string"})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result}


def read_text(path: Path) -> str:
    """A small UTF-8 file. Raises UserError with one sentence when it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAXIMUM_BYTES + 1)  # a device or a pipe may never end
        if len(data) > MAXIMUM_BYTES:
            raise UserError(f"{path}: is larger than 256 KiB; that is no topology")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _yaml_problem(problem: yaml_lines.YamlProblem, file: str) -> Problem:
    return Problem(file, problem.mark.line, problem.mark.column, dotted(problem.path), problem.message)


def _validate(data: Any, base: Path) -> tuple[Topology | None, list[Finding]]:
    try:
        return Topology.model_validate(data, context={"base": base}), []
    except ValidationError as error:
        return None, list(_findings(error))


def _findings(error: ValidationError, prefix: yaml_lines.Path = ()) -> Iterator[Finding]:
    """pydantic's errors in our words."""
    for item in error.errors(include_url=False):
        path: yaml_lines.Path = (*prefix, *item["loc"])
        kind = item["type"]
        if path and path[-1] == "[key]":
            yield Finding(path[:-1], str(item["ctx"]["error"]), at_key=True)
        elif kind == "missing":
            yield Finding(path, "is required")
        elif kind == "extra_forbidden":
            allowed = tuple(_section(path[:-1]).model_fields)
            hint = did_you_mean(path[-1], allowed) or f"; allowed are {listed(allowed).replace(' or ', ' and ')}"
            yield Finding(path, f"is not a key here{hint}", at_key=True)
        elif kind in ("model_type", "model_attributes_type", "dict_type"):
            yield Finding(path, f"must be a mapping, not {shown(item['input'])}")
        elif kind == "tuple_type":
            yield Finding(path, f"must be a list, not {shown(item['input'])}")
        elif kind == "value_error":
            yield Finding(path, str(item["ctx"]["error"]))
        else:
            yield Finding(path, item["msg"])


def _section(path: yaml_lines.Path) -> type[Section]:
    names = tuple(part for part in path if isinstance(part, str))
    return _SECTIONS[names[:1] if names[:1] == ("hosts",) else names]


def _with_profiles(document: yaml_lines.Document, file: str, base: Path, problems: list[Problem]) -> Any:
    """The data with each `profile: path` replaced by what that file holds; its problems are reported in that file."""
    data = document.data
    if not isinstance(data, dict):
        return data
    data = dict(data)
    for section in ("drafters", "targets"):
        if isinstance(data.get(section), list):
            items = enumerate(data[section])
            data[section] = [_with_profile(item, (section, i), document, file, base, problems) for i, item in items]
    return data


def _with_profile(
    item: Any, path: yaml_lines.Path, document: yaml_lines.Document, file: str, base: Path, problems: list[Problem]
) -> Any:
    if not isinstance(item, dict) or not isinstance(item.get("profile"), str):
        return item
    try:
        place = Path(base, os.path.expanduser(item["profile"]))
        inner = yaml_lines.read_yaml(read_text(place))
    except UserError as error:
        problems.append(located(Finding((*path, "profile"), str(error)), document, file))
        return {**item, "profile": None}
    if inner.problems:
        problems += [_yaml_problem(p, str(place)) for p in inner.problems]
        return {**item, "profile": None}
    try:
        Profile.model_validate(inner.data)
    except ValidationError as error:
        for finding in _findings(error, prefix=("drafters", "profile")):
            problems.append(located(Finding(finding.path[2:], finding.message, finding.at_key), inner, str(place)))
        return {**item, "profile": None}
    return {**item, "profile": inner.data}


def _salvage(data: Any, findings: list[Finding], base: Path) -> Parts:
    """What is valid in a file that is not, so that the other checks report at once, too.

    A wrong value is left out; where it is required a placeholder stands in that no check finds fault with.
    """
    data = with_addresses(data) if isinstance(data, dict) else {}
    bad = {finding.path for finding in findings}

    def valid(model: type[Section], path: yaml_lines.Path, value: Any, stand_in: dict[str, Any]) -> Any:
        if not isinstance(value, dict):
            return None
        keep = {key: item for key, item in value.items() if not _touched((*path, key), bad)}
        keep |= {key: item for key, item in stand_in.items() if _touched((*path, key), bad)}
        try:
            return model.model_validate(keep, context={"base": base})
        except ValidationError:
            return None

    def items(model: type[Section], name: str) -> dict[int, Any]:
        values = data.get(name) if isinstance(data.get(name), list) else []
        result = {}
        for index, value in enumerate(values or []):
            listen = f"127.127.127.127:{2 * index + (1 if model is TargetSpec else 2)}"
            place: dict[str, Any] = {"listen": listen} if model is DrafterSpec else {"api": {"listen": listen}}
            stand_in = {"name": f"{name}.{index}", "model": "/unknown", **place}
            result[index] = valid(model, (name, index), value, stand_in)
        return {index: value for index, value in result.items() if value is not None}

    hosts = data.get("hosts") if isinstance(data.get("hosts"), dict) else {}
    raw_drafters = data.get("drafters") if isinstance(data.get("drafters"), list) else []
    return Parts(
        security=valid(Security, ("security",), data.get("security", {}), {}),
        link=valid(LinkSpec, ("link",), data.get("link", {}), {}) or LinkSpec(),
        hosts={str(name): valid(Host, ("hosts", name), value, {}) for name, value in (hosts or {}).items()},
        drafters=items(DrafterSpec, "drafters"),
        targets=items(TargetSpec, "targets"),
        drafter_names={str(d.get("name")) for d in raw_drafters or [] if isinstance(d, dict)},
    )


def _touched(path: yaml_lines.Path, bad: set[yaml_lines.Path]) -> bool:
    return any(other[: len(path)] == path for other in bad)
