"""What a topology file may hold: one frozen model a section.

Relative paths are relative to the YAML file. Attribute docstrings become the descriptions of the JSON Schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from paceline.core.profile import StepTimes
from paceline.topology import spec_values as v
from paceline.topology.spec_values import Address, words

DRAFTER_PORT = 7070
API_PORT = 8001


class Section(BaseModel):
    """A mapping of the file; a key that is not listed is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Security(Section):
    """Who may connect, and whether links are encrypted."""

    key_file: v.FilePath | None = None
    """The deployment key; needed as soon as a drafter listens beyond loopback, or the broker is not on loopback."""
    certificates: v.FolderPath | None = None
    """Folder with ca.pem, NODE.pem and NODE.key, as `paceline keys init` makes it. Default: the folder of key_file."""
    encrypt: v.Flag = True
    """TLS on links and HTTPS beyond loopback; on loopback links, too, where certificates is written. `false` leaves
    authentication on and encryption off."""


class LinkSpec(Section):
    """How targets and drafters reach one another."""

    transport: Annotated[Literal["tcp", "mqtt", "memory"], words("tcp", "mqtt", "memory")] = "tcp"
    """tcp, mqtt, or memory (all nodes as threads of one process)."""
    broker: v.Broker | None = None
    """MQTT: mqtt://host:port or mqtts://host:port."""
    ca: v.FilePath | None = None
    """MQTT: certificate authority of the broker."""
    cert: v.FilePath | None = None
    """MQTT: client certificate."""
    key: v.FilePath | None = None
    """MQTT: key of the client certificate."""
    username: v.NodeText | None = None
    """MQTT: user name; ${NODE} in it stands for the node's own name."""
    password_file: v.NodeFilePath | None = None
    """MQTT: a file that holds the password; ${NODE} in it stands for the node's own name."""
    topic_prefix: v.Text | None = None
    """MQTT: what topics start with. Default: paceline."""
    local_broker: v.Flag = False
    """MQTT: the broker is started with the nodes, on this machine: mosquitto, else amqtt."""

    def username_of(self, node: str) -> str | None:
        """The user that a node is at the broker."""
        return self.username and self.username.replace(v.NODE, node)

    def password_file_of(self, node: str) -> Path | None:
        """The file that holds that user's password."""
        return self.password_file and Path(str(self.password_file).replace(v.NODE, node))

    @property
    def broker_address(self) -> Address:
        """Where the broker listens; 1883 and 8883 are the usual ports. ValueError when that is no address."""
        scheme, _, place = (self.broker or "").partition("://")
        with_port = place.rpartition(":")[2].isdigit() and not place.endswith("]")
        return v.read_address(place if with_port else f"{place}:{8883 if scheme == 'mqtts' else 1883}")


class Host(Section):
    """Another machine."""

    address: v.HostAddress
    """Host name or IP address under which the others reach it."""
    user: v.Name | None = None
    """Who to log in as."""


class Profile(Section):
    """Step times and agreement of an emulated model."""

    step_ms: v.StepMilliseconds = StepTimes.constant(2.0)
    """Milliseconds of one draft step; a number, or numbers by sequences in the step."""
    verify_ms: v.StepMilliseconds = StepTimes.constant(20.0)
    """Milliseconds of one verification pass; a number, or numbers by tokens in the pass."""
    prompt_token_ms: v.Milliseconds = 0.0
    """Milliseconds more for each token of a drafter's pass, which counts when it reads a prompt."""
    agreement: v.Share = 0.8
    """Probability that the drafter proposes the target's own token."""
    agreement_spread: v.Share = 0.0
    """Texts differ: the agreement of each lies in agreement ± this, and the drafter knows it."""
    second_choice: v.Share = 0.4
    """Probability that the drafter's second choice is right where its first is not."""
    vocabulary_size: Annotated[int, v.integer(2, 1_000_000)] = 257
    """Tokens of the toy language."""
    seed: Annotated[int, v.integer(0, 2**32 - 1)] = 0
    """Which toy language."""


class DrafterSpec(Section):
    """A process that holds one draft model and serves targets."""

    name: v.Name
    """Unique in the file."""
    host: v.Name | None = None
    """A name out of `hosts`; without it the drafter runs on this machine."""
    model: v.ModelName | None = None
    """Bundle, local path or hub id. The ngram strategy takes none."""
    tokenizer: v.ModelName | None = None
    """Where the tokenizer is when it is not beside the model."""
    strategy: Annotated[Literal["draft_model", "ngram"], words("draft_model", "ngram")] = "draft_model"
    """How drafts are made."""
    runtime: Annotated[
        Literal["tensorrt", "onnxruntime", "torch", "emulated"], words("tensorrt", "onnxruntime", "torch", "emulated")
    ] = "torch"
    """What executes the draft model. Default: torch; of a bundle, what it was exported for."""
    provider: Annotated[Literal["cuda", "tensorrt"], words("cuda", "tensorrt")] | None = None
    """ONNX Runtime on a CUDA device: what of it executes the graph. Default: cuda."""
    profile: Profile | None = None
    """Emulated: step times, in place or the path of a file that holds them."""
    device: v.Device = "cpu"
    """cpu, cuda or cuda:0."""
    listen: v.Listen
    """host:port. Default 127.0.0.1:7070 for the first drafter, 7071 for the second, and so on."""
    max_sessions: v.Count = 16
    """Sessions held at a time; more are answered `full`. Default: 16; of a graph, what it was exported for."""
    max_context: v.Tokens = 2048
    """Longest session in tokens; past it a session is decoded plainly. Default: 2048; of a graph, what it was exported
    for."""
    kv_memory: v.Size | None = None
    """Memory for keys and values. Default: enough for max_sessions × max_context."""
    max_batch: v.Count = 8
    """Sessions in one step."""
    threads: v.Threads | None = None
    """CPU threads; default what the runtime chooses."""
    record: v.Flag = True
    """Rounds and sensors are recorded in the run directory, for `paceline report` and `paceline trace`."""


class DraftersOf(Section):
    """Which drafters serve a target."""

    names: tuple[v.Name, ...]
    """Names out of `drafters`, best first."""
    policy: Annotated[Literal["failover", "spread"], words("failover", "spread")] = "failover"
    """failover: the first that is up. spread: sessions go to all, by free capacity."""


class Api(Section):
    """Where users talk to a target."""

    listen: v.Listen
    """host:port. Default 127.0.0.1:8001 for the first target, 8002 for the second, and so on."""
    key_file: v.FilePath | None = None
    """A file that holds the key users must send; needed beyond loopback."""
    cert: v.FilePath | None = None
    """HTTPS: certificate chain. Default beyond loopback: the target's out of security.certificates."""
    key: v.FilePath | None = None
    """HTTPS: key of that certificate."""


class TargetSpec(Section):
    """A process that holds a target model, verifies, and serves users."""

    name: v.Name
    """Unique in the file."""
    host: v.Name | None = None
    """A name out of `hosts`; without it the target runs on this machine."""
    model: v.ModelName
    """Local path or hub id."""
    tokenizer: v.ModelName | None = None
    """Where the tokenizer is when it is not beside the model."""
    engine: Annotated[Literal["torch", "vllm", "emulated"], words("torch", "vllm", "emulated")] = "torch"
    """What executes the target model."""
    profile: Profile | None = None
    """Emulated: step times, in place or the path of a file that holds them."""
    device: v.Device = "cpu"
    """cpu, cuda or cuda:0."""
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"], words("float64", "float32", "bfloat16", "float16")
    ] = "float32"
    """Type of weights and arithmetic."""
    drafters: DraftersOf = DraftersOf(names=())
    """Without any the target decodes plainly."""
    lanes: v.Lanes = 1
    """1 is standard or star, 2 is two-lane; 1..8 or auto."""
    draft_length: v.DraftLength = 4
    """Tokens proposed for a session in one round; 0..16 or auto. 0 is plain decoding."""
    verification: Annotated[Literal["coupled", "rejection"], words("coupled", "rejection")] = "coupled"
    """coupled: same seed, same text, with or without drafts. rejection: more drafts accepted at high temperature; texts
    follow the target's distribution, but which one comes depends on the drafts. It needs security.key_file."""
    deadline: v.Seconds | None = None
    """How long a round waits for a drafter. Default: learnt from the link."""
    draft_ahead: v.DraftAhead = 0
    """For how many outcomes of a round under way the drafter prepares the next one, in idle time; 0..16, about
    draft_length + 1. It is left off where it does not pay."""
    verify_budget: v.Count | None = None
    """Most draft tokens that a lane's pass verifies: those that are likeliest to be right, whosever they are."""
    max_sessions: v.Count = 32
    """Sessions decoded at a time; more wait."""
    max_context: v.Tokens = 4096
    """Longest session in tokens, prompt included."""
    kv_memory: v.Size | None = None
    """Memory for keys and values. Default: enough for max_sessions × max_context."""
    prefill_chunk: v.Tokens = 256
    """Prompt tokens that ride along in one pass."""
    weight: v.Weight = 1.0
    """Share of a drafter's time in relation to the other targets."""
    drain: v.Seconds = 10.0
    """How long a target that is told to stop lets its requests finish."""
    threads: v.Threads | None = None
    """CPU threads; default what the engine chooses."""
    api: Api
    """Where users talk to it."""


class Topology(Section):
    """One deployment: who drafts, who verifies, and how they are linked."""

    version: Annotated[Literal[1], v.integer(1, 1)]
    """Of this format: 1."""
    name: v.Name
    """Of the deployment; peers of another one are refused."""
    security: Security = Security()
    """Key and encryption."""
    link: LinkSpec = LinkSpec()
    """Transport."""
    hosts: dict[v.Name, Host] = Field(default_factory=dict)
    """Other machines by name."""
    drafters: tuple[DrafterSpec, ...] = ()
    """Draft models."""
    targets: tuple[TargetSpec, ...]
    """Target models."""
    _file: str = PrivateAttr("FILE.yaml")

    @property
    def file(self) -> str:
        """What messages call the file that it was read from."""
        return self._file

    @model_validator(mode="before")
    @classmethod
    def _default_addresses(cls, data: Any) -> Any:
        """Ports by position: what the user leaves out is predictable and the same in every process."""
        return with_addresses(data)

    def drafter(self, name: str) -> DrafterSpec:
        """The drafter of that name; KeyError when there is none."""
        return {drafter.name: drafter for drafter in self.drafters}[name]

    def target(self, name: str) -> TargetSpec:
        """The target of that name; KeyError when there is none."""
        return {target.name: target for target in self.targets}[name]

    def drafters_of(self, target: TargetSpec) -> tuple[DrafterSpec, ...]:
        """Its drafters in the order written."""
        return tuple(self.drafter(name) for name in target.drafters.names)

    def targets_of(self, drafter: DrafterSpec) -> tuple[TargetSpec, ...]:
        """The targets that a drafter serves, in the order written."""
        return tuple(target for target in self.targets if drafter.name in target.drafters.names)

    @property
    def longest_drain(self) -> float:
        """Seconds that some target may take to let its requests finish."""
        return max(target.drain for target in self.targets)

    def connect_address(self, drafter: DrafterSpec, target: TargetSpec) -> Address:
        """Where that target finds that drafter: loopback on one machine, else the address of the drafter's host."""
        if not drafter.listen.is_any:
            return drafter.listen
        if drafter.host == target.host or drafter.host is None:
            return drafter.listen.from_here
        return Address(self.hosts[drafter.host].address, drafter.listen.port)

    def link_address(self, drafter: DrafterSpec, target: TargetSpec | None = None) -> str:
        """What the transport calls that drafter: as `target` dials it, or as it listens. With MQTT it is its name."""
        if self.link.transport == "mqtt":
            return drafter.name
        return str(drafter.listen if target is None else self.connect_address(drafter, target))


def with_addresses(data: Any) -> Any:
    """A copy of the raw file in which every drafter and every api listens somewhere."""
    if not isinstance(data, dict):
        return data
    data = dict(data)
    if isinstance(data.get("drafters"), list):
        data["drafters"] = [
            {"listen": f"127.0.0.1:{DRAFTER_PORT + i}", **d} if isinstance(d, dict) else d
            for i, d in enumerate(data["drafters"])
        ]
    if isinstance(data.get("targets"), list):
        data["targets"] = [_with_api(t, i) for i, t in enumerate(data["targets"])]
    return data


def _with_api(target: Any, index: int) -> Any:
    api = target.get("api", {}) if isinstance(target, dict) else None
    if not isinstance(api, dict):
        return target
    return {**target, "api": {"listen": f"127.0.0.1:{API_PORT + index}", **api}}
