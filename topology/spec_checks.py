"""What must fit together in a topology, beyond the single values.

Each check is a pure function from the parts to findings. Parts may be incomplete: what failed to
parse is left out, so that one wrong value does not hide the other problems.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath

from paceline.topology.credentials import (
    KEYS_COMMAND,
    api_certificate,
    api_is_encrypted,
    certificates_folder,
    clashes,
    name_problem,
    needs_certificate,
)
from paceline.topology.spec_bundles import graphics, providers
from paceline.topology.spec_errors import Finding
from paceline.topology.spec_models import DrafterSpec, Host, LinkSpec, Profile, Security, TargetSpec, Topology
from paceline.topology.spec_values import Address, cache_folder, did_you_mean
from paceline.topology.yaml_lines import Path

BROKER = "broker"  # the node that local_broker starts


@dataclass(frozen=True)
class Parts:
    """The valid parts of a file, by their index in it. security is None when that section is wrong itself."""

    security: Security | None
    link: LinkSpec
    hosts: dict[str, Host | None]
    drafters: dict[int, DrafterSpec]
    targets: dict[int, TargetSpec]
    drafter_names: set[str]
    complete: bool = False  # the whole file is valid
    file: str = "FILE.yaml"  # what messages call it

    @staticmethod
    def of(topology: Topology) -> Parts:
        """All of a valid topology."""
        return Parts(
            topology.security,
            topology.link,
            dict(topology.hosts),
            dict(enumerate(topology.drafters)),
            dict(enumerate(topology.targets)),
            {drafter.name for drafter in topology.drafters},
            complete=True,
        )

    def nodes(self) -> Iterator[tuple[str, int, DrafterSpec | TargetSpec]]:
        """(section, index, node) of all drafters and targets."""
        for index, drafter in self.drafters.items():
            yield "drafters", index, drafter
        for index, target in self.targets.items():
            yield "targets", index, target


def cross_check(parts: Parts) -> Iterator[Finding]:
    """Everything that does not fit together."""
    checks = (_targets, _names, _references, _hosts, _addresses, _reach, _keys, _link, _models, _profiles, _rejection)
    for check in checks:
        yield from check(parts)


def unsupported(parts: Parts) -> Iterator[Finding]:
    """What the format knows and this version does not do yet: refused, so that it is never silently ignored."""
    for index, target in parts.targets.items():
        for key, why in _missing_features(target):
            yield Finding(("targets", index, key), why)


def _missing_features(target: TargetSpec) -> Iterator[tuple[str, str]]:
    if target.engine == "vllm":
        yield "engine", "vllm is not available in this version; use torch"


def missing_models(topology: Topology) -> list[Finding]:
    """Local models that nodes of this machine name and that are not there. Hub ids are not looked up."""
    missing: list[Finding] = []
    cache = cache_folder()
    for section, index, node in Parts.of(topology).nodes():
        for key, name in (("model", node.model), ("tokenizer", node.tokenizer)):
            if node.host is None and name and name.startswith("/") and not FilePath(name).exists():
                hint = "; run scripts/fetch_models" if cache in FilePath(name).parents else ""
                missing.append(Finding((section, index, key), f"{name} does not exist{hint}"))
    return missing


def _targets(parts: Parts) -> Iterator[Finding]:
    if parts.complete and not parts.targets:
        yield Finding(("targets",), "at least one target is needed")


def _names(parts: Parts) -> Iterator[Finding]:
    """Names are unique among all nodes: commands and logs tell nodes apart by them."""
    seen: dict[str, str] = {}
    for section, index, node in parts.nodes():
        if node.name in seen:
            yield Finding((section, index, "name"), f"{node.name} is already the name of {seen[node.name]}")
        seen.setdefault(node.name, f"{section}[{index}]")


def _references(parts: Parts) -> Iterator[Finding]:
    for index, target in parts.targets.items():
        names = target.drafters.names
        for place, name in enumerate(names):
            path = ("targets", index, "drafters", "names", place)
            if name not in parts.drafter_names:
                known = tuple(sorted(parts.drafter_names))
                hint = did_you_mean(name, known) or (f"; there are {', '.join(known)}" if known else "")
                yield Finding(path, f"there is no drafter {name}{hint}")
            elif name in names[:place]:
                yield Finding(path, f"{name} is given twice")


def _hosts(parts: Parts) -> Iterator[Finding]:
    for section, index, node in parts.nodes():
        if node.host is not None and node.host not in parts.hosts:
            known = tuple(sorted(parts.hosts))
            hint = did_you_mean(node.host, known) or (f"; there are {', '.join(known)}" if known else "")
            yield Finding((section, index, "host"), f"there is no host {node.host} in hosts{hint}")
        elif node.host is not None and parts.link.transport == "memory":
            message = "memory links join threads of one process; remove host, or use transport: tcp"
            yield Finding((section, index, "host"), message)


def _addresses(parts: Parts) -> Iterator[Finding]:
    """No two sockets of one machine want the same port."""
    seen: list[tuple[str | None, Address, str]] = []
    over_broker = parts.link.transport == "mqtt"
    if over_broker and parts.link.local_broker and _broker_address(parts.link) is not None:
        seen.append((None, parts.link.broker_address, "link.broker"))
    for section, index, node in parts.nodes():
        if over_broker and section == "drafters":
            continue  # it listens at the broker
        path, listen = _listen(section, index, node)
        for host, other, who in seen:
            same = other.host == listen.host or other.is_any or listen.is_any
            if host == node.host and other.port == listen.port and same:
                yield Finding(path, f"{listen} is already taken by {who}")
                break
        seen.append((node.host, listen, f"{section}[{index}] ({other_name(node)})"))


def other_name(node: DrafterSpec | TargetSpec) -> str:
    """How messages call a node: its name and address."""
    return f"{node.name}, {node.listen if isinstance(node, DrafterSpec) else node.api.listen}"


def _listen(section: str, index: int, node: DrafterSpec | TargetSpec) -> tuple[Path, Address]:
    if isinstance(node, DrafterSpec):
        return (section, index, "listen"), node.listen
    return (section, index, "api", "listen"), node.api.listen


def _reach(parts: Parts) -> Iterator[Finding]:
    """Each target can connect to its drafters."""
    if parts.link.transport != "tcp":
        return
    for index, drafter in parts.drafters.items():
        path = ("drafters", index, "listen")
        for target in parts.targets.values():
            if drafter.name not in target.drafters.names or drafter.host == target.host:
                continue
            if not {drafter.host, target.host} <= {None, *parts.hosts}:
                continue  # reported as an unknown host
            if drafter.listen.is_loopback:
                where = (
                    f"target {target.name} runs on {target.host or 'this machine'} and cannot reach {drafter.listen}"
                )
                yield Finding(path, f"{where}; listen on 0.0.0.0:{drafter.listen.port}")
                break
            if drafter.listen.is_any and drafter.host is None:
                message = f"target {target.name} on {target.host} needs an address: name this machine in hosts"
                yield Finding(path, message)
                break


def _keys(parts: Parts) -> Iterator[Finding]:
    """Whatever listens beyond loopback needs a key, and a certificate unless encryption is turned off."""
    for index, drafter in parts.drafters.items():
        if parts.link.transport == "mqtt":
            break  # drafters listen at the broker: see _mqtt
        if not drafter.listen.is_loopback and parts.security is not None and parts.security.key_file is None:
            message = f"{drafter.listen} is reachable from other machines: that needs security.key_file"
            yield Finding(("drafters", index, "listen"), f"{message}; {_key_line(parts)}")
    for index, target in parts.targets.items():
        if not target.api.listen.is_loopback and target.api.key_file is None:
            message = f"{target.api.listen} is reachable from other machines: that needs targets[{index}].api.key_file"
            yield Finding(("targets", index, "api", "listen"), message)
        elif parts.security is not None:
            yield from _api_certificate(("targets", index, "api"), parts, parts.security, target)
    if parts.security is not None:
        yield from _certificate_names(parts, parts.security)
        yield from _clashes(parts, parts.security)


def _rejection(parts: Parts) -> Iterator[Finding]:
    """Whoever can put words into a drafter's mouth can bias texts: its links have a key, and nobody can change them."""
    if parts.security is None or parts.link.transport == "memory":
        return
    open_to_all = set()
    if parts.link.transport == "tcp" and not parts.security.encrypt:
        open_to_all = {drafter.name for drafter in parts.drafters.values() if not drafter.listen.is_loopback}
    for index, target in parts.targets.items():
        path = ("targets", index, "verification")
        if target.verification != "rejection" or not target.drafters.names:
            continue
        if parts.security.key_file is None:
            yield Finding(path, "rejection needs authenticated links: write security.key_file, or use coupled")
        elif exposed := open_to_all & set(target.drafters.names):
            message = f"rejection needs a link to {min(exposed)} that nobody can change: remove encrypt: false"
            yield Finding(path, f"{message}, or use coupled")


def _key_line(parts: Parts) -> str:
    """What to write, and what to run."""
    return f"write security: {{key_file: secrets/deployment.key}} and run: {KEYS_COMMAND} {parts.file}"


def _api_certificate(path: Path, parts: Parts, security: Security, target: TargetSpec) -> Iterator[Finding]:
    api = target.api
    if (api.cert is None) != (api.key is None):
        given, other = ("cert", "key") if api.key is None else ("key", "cert")
        yield Finding((*path, given), f"needs {other} beside it")
    elif api_is_encrypted(security, target) and api_certificate(security, target) is None:
        message = "is reachable from other machines: that needs security.key_file or security.certificates for HTTPS"
        yield Finding((*path, "listen"), f"{api.listen} {message}, or encrypt: false; {_key_line(parts)}")


def _certificate_names(parts: Parts, security: Security) -> Iterator[Finding]:
    drafters = {drafter.name: drafter for drafter in parts.drafters.values()}
    for section, index, node in parts.nodes():
        if needs_certificate(security, parts.link.transport, node, drafters) and (why := name_problem(node.name)):
            yield Finding((section, index, "name"), why)


def _clashes(parts: Parts, security: Security) -> Iterator[Finding]:
    """Each secret has a file of its own. Names that cannot be in a certificate at all are told elsewhere."""
    folder = certificates_folder(security)
    if folder is None:
        return
    drafters = {drafter.name: drafter for drafter in parts.drafters.values()}
    places: dict[object, Path] = {None: ("security", "key_file")}
    nodes: list[str] = []
    for section, index, node in parts.nodes():
        if isinstance(node, TargetSpec) and node.api.key_file is not None:
            places.setdefault(node.api.key_file, (section, index, "api", "key_file"))
        if needs_certificate(security, parts.link.transport, node, drafters) and name_problem(node.name) is None:
            places[node.name] = (section, index, "name")
            nodes.append(node.name)
    api_keys = [place for place in places if isinstance(place, FilePath)]
    for clash in clashes(folder, security.key_file, nodes, api_keys):
        yield Finding(places[clash.subject], clash.problem)


def _link(parts: Parts) -> Iterator[Finding]:
    if parts.link.transport == "mqtt":
        yield from _mqtt(parts)
        return
    for key in sorted(parts.link.model_fields_set - {"transport"}):
        yield Finding(("link", key), f"is only for transport: mqtt, not {parts.link.transport}", at_key=True)


def _mqtt(parts: Parts) -> Iterator[Finding]:
    """The broker can be reached, and what goes there is not for everybody to read and write."""
    link = parts.link
    for given, other in (("username", "password_file"), ("cert", "key")):
        for one, two in ((given, other), (other, given)):
            if getattr(link, one) is not None and getattr(link, two) is None:
                yield Finding(("link", one), f"needs {two} beside it")
    prefix = link.topic_prefix
    if prefix is not None and not (_TOPIC_PREFIX.fullmatch(prefix) and prefix.isprintable()):
        message = "must be 1..32 printable words of a topic such as site-1/paceline, without + # or $"
        yield Finding(("link", "topic_prefix"), message)
    if link.broker is None:
        if not parts.complete and "broker" in link.model_fields_set:
            return
        yield Finding(("link", "broker"), "is required with transport: mqtt")
        return
    address = _broker_address(link)
    if address is None:
        yield Finding(("link", "broker"), "must be mqtt://host:port or mqtts://host:port")
        return
    tls = link.broker.startswith("mqtts:")
    for key in ("ca", "cert"):
        if getattr(link, key) is not None and not tls:
            yield Finding(("link", key), "is for a broker at mqtts://", at_key=True)
    if link.local_broker:
        yield from _local_broker(parts, address, tls)
    elif address.is_loopback:
        yield from _far_from_broker(parts, address)
    elif parts.security is not None:
        if parts.security.key_file is None:
            message = f"{address} is on another machine: that needs security.key_file"
            yield Finding(("link", "broker"), f"{message}; {_key_line(parts)}")
        if not tls and parts.security.encrypt:
            yield Finding(("link", "broker"), f"{address} is on another machine: write mqtts://, or encrypt: false")


_TOPIC_PREFIX = re.compile(r"[^/+#$][^/+#]*(/[^/+#]+){0,31}")  # brokers take 200 levels at most, some fewer


def _broker_address(link: LinkSpec) -> Address | None:
    try:
        return link.broker_address
    except ValueError:
        return None


def _local_broker(parts: Parts, address: Address, tls: bool) -> Iterator[Finding]:
    if not address.is_loopback or tls:
        message = "local_broker is for programs on this machine only: write mqtt://127.0.0.1:18830"
        yield Finding(("link", "broker"), message)
    else:
        yield from _far_from_broker(parts, address)
    for section, index, node in parts.nodes():
        if node.name == BROKER:
            yield Finding((section, index, "name"), f"{BROKER} is what the local broker is called")


def _far_from_broker(parts: Parts, address: Address) -> Iterator[Finding]:
    for _, _, node in parts.nodes():
        if node.host is not None:
            message = f"{node.name} runs on {node.host} and cannot reach {address}, which is this machine only"
            yield Finding(("link", "broker"), message)
            return


def _models(parts: Parts) -> Iterator[Finding]:
    yield from providers(parts.drafters)
    yield from graphics(parts.drafters)
    for index, drafter in parts.drafters.items():
        path = ("drafters", index)
        if drafter.strategy == "ngram":
            for key in ("model", "runtime", "provider", "profile", "kv_memory"):
                if key in drafter.model_fields_set and getattr(drafter, key) is not None:
                    message = "the ngram strategy drafts from the text itself and has none; remove it"
                    yield Finding((*path, key), message, at_key=True)
        elif drafter.model is None:
            yield Finding((*path, "model"), "is required with strategy: draft_model")


def _profiles(parts: Parts) -> Iterator[Finding]:
    """Emulated nodes have profiles, and are not mixed with real ones."""
    for section, index, node in parts.nodes():
        if node.profile is not None and not is_emulated(node) and getattr(node, "strategy", "") != "ngram":
            kind = "runtime" if isinstance(node, DrafterSpec) else "engine"
            yield Finding((section, index, "profile"), f"is only for {kind}: emulated", at_key=True)
    for path, drafter, target in _pairs(parts):
        if is_emulated(drafter) != is_emulated(target):
            yield Finding(path, f"{drafter.name} and {target.name} must both be emulated, or neither")


def same_language(parts: Parts) -> Iterator[Finding]:
    """An emulated drafter and its targets speak the same toy language."""
    for path, drafter, target in _pairs(parts):
        ours, theirs = drafter.profile or Profile(), target.profile or Profile()
        if (ours.vocabulary_size, ours.seed) != (theirs.vocabulary_size, theirs.seed):
            message = f"the profiles of {drafter.name} and {target.name} must have the same vocabulary_size and seed"
            yield Finding(path, message)


def _pairs(parts: Parts) -> Iterator[tuple[Path, DrafterSpec, TargetSpec]]:
    """(path of the reference, drafter, target) wherever a target names a drafter with a draft model."""
    drafters = {drafter.name: drafter for drafter in parts.drafters.values() if drafter.strategy == "draft_model"}
    for index, target in parts.targets.items():
        for place, name in enumerate(target.drafters.names):
            if name in drafters:
                yield ("targets", index, "drafters", "names", place), drafters[name], target


def is_emulated(node: DrafterSpec | TargetSpec) -> bool:
    """It has the toy language instead of a model."""
    return (node.runtime if isinstance(node, DrafterSpec) else node.engine) == "emulated"
