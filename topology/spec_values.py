"""The values a topology is written in: sizes, seconds, addresses, names, paths.

Each is a `Rule`: it reads what the YAML holds and says in one sentence what is allowed, and it carries
the JSON Schema that editors see. pydantic's own messages are not used for single values: they
describe Python types, while people need to know what to write.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic_core import CoreSchema, core_schema

from paceline.core.profile import StepTimes

NODE = "${NODE}"  # in some values of link: the name of the node that reads them
Base = Path | None  # the folder of the YAML file: what relative paths are relative to


@dataclass(frozen=True, eq=False)
class Rule:
    """Reads one value for pydantic. `read` gets (value, folder of the file) and raises ValueError with a sentence."""

    read: Callable[[Any, Base], Any]
    schema: Mapping[str, Any]
    as_text: bool = False  # how it is written to JSON
    write: Callable[[Any], Any] | None = None  # the same, where text is not it

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        def validate(value: Any, info: core_schema.ValidationInfo[Any]) -> Any:
            return self.read(value, (info.context or {}).get("base"))

        serialization: Any = core_schema.to_string_ser_schema() if self.as_text else None
        if self.write is not None:
            serialization = core_schema.plain_serializer_function_ser_schema(self.write)
        return core_schema.with_info_plain_validator_function(validate, serialization=serialization)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return dict(self.schema)


def integer(low: int, high: int, auto: bool = False) -> Rule:
    """A whole number low..high, or the word auto where `auto`."""
    allowed = f"{low}..{high}" + (" or auto" if auto else "")

    def read(value: Any, base: Base) -> Any:
        if (auto and value == "auto") or (type(value) is int and low <= value <= high):
            return value
        raise ValueError(f"must be {allowed}, not {shown(value)}")

    number = {"type": "integer", "minimum": low, "maximum": high}
    return Rule(read, {"anyOf": [number, {"const": "auto"}]} if auto else number)


def number(low: float, high: float) -> Rule:
    """A number low..high."""

    def read(value: Any, base: Base) -> float:
        if type(value) in (int, float) and math.isfinite(value) and low <= value <= high:
            return float(value)
        raise ValueError(f"must be a number from {low:g} to {high:g}, not {shown(value)}")

    return Rule(read, {"type": "number", "minimum": low, "maximum": high})


def words(*allowed: str) -> Rule:
    """One of a few words."""

    def read(value: Any, base: Base) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        hint = did_you_mean(value, allowed)
        raise ValueError(f"must be {listed(allowed)}, not {shown(value)}{hint}")

    return Rule(read, {"enum": list(allowed)})


def pattern(expression: str, meaning: str) -> Rule:
    """Text of a certain form."""
    compiled = re.compile(expression)

    def read(value: Any, base: Base) -> str:
        if isinstance(value, str) and compiled.fullmatch(value):
            return value
        raise ValueError(f"must be {meaning}, not {shown(value)}")

    return Rule(read, {"type": "string", "pattern": f"^(?:{expression})$"})


@dataclass(frozen=True)
class Address:
    """Where a socket listens or connects."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Only programs on the same machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_any(self) -> bool:
        """It stands for all addresses of the machine."""
        return self.host in ("0.0.0.0", "::")

    @property
    def from_here(self) -> Address:
        """Where a program on the same machine connects."""
        if not self.is_any:
            return self
        return Address("::1" if self.host == "::" else "127.0.0.1", self.port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


# A label has 1 to 63 characters and a name at most 253: Python's look-up breaks on others, rather than not find them.
_HOST_NAME = r"(?![_-])(?![^:]{254})[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*(?<![_-])"
_ADDRESS = re.compile(rf"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>{_HOST_NAME})):(?P<port>[0-9]{{1,5}})")


def read_address(value: Any, base: Base = None) -> Address:
    """`host:port`, with IPv6 in brackets. Raises ValueError."""
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"must be host:port, such as 127.0.0.1:7070, not {shown(value)}")
    host = match["six"] or match["host"]
    if match["six"] or re.fullmatch(r"[0-9.]+", host):
        try:
            host = str(ipaddress.ip_address(host))
        except ValueError:
            raise ValueError(f"must be host:port; {shown(host)} is not an IP address") from None
    port = int(match["port"])
    if not 1 <= port <= 65535:
        raise ValueError(f"must have a port from 1 to 65535, not {port}")
    return Address(host, port)


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS |= {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([kKMGT]i?B|B|)")


def read_size(value: Any, base: Base = None) -> int:
    """2GiB, 512MiB, 1.5GB or plain bytes → bytes. Raises ValueError."""
    match = _SIZE.fullmatch(str(value)) if type(value) in (int, str) else None
    if match and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
        if 0 < size < 2**63:
            return size
    raise ValueError(f"must be a size such as 2GiB or 512MiB, not {shown(value)}")


_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_SECONDS = re.compile(rf"({_NUMBER.pattern}) ?(ms|us|s|min)")
_NO_TIME = re.compile(r"0+(?:\.0+)? ?(?:ms|us|s|min)?")
_A_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0, "min": 1 / 60}


def read_seconds(value: Any, base: Base = None) -> float:
    """0.2, 200ms or 2s → seconds, more than 0. Raises ValueError."""
    match = _SECONDS.fullmatch(value) if isinstance(value, str) else None
    seconds = float(match[1]) / _A_SECOND[match[2]] if match else value
    if type(seconds) in (int, float) and 0 < seconds <= 3600:
        return float(seconds)
    raise ValueError(f"must be seconds, such as 0.2, or a time such as 200ms, not {shown(value)}")


def read_seconds_option(text: str) -> float:
    """The same out of a command line, where numbers are text, and with 0 as a time too. Raises ValueError."""
    if _NO_TIME.fullmatch(text):
        return 0.0
    return read_seconds(float(text) if _NUMBER.fullmatch(text) else text)


def read_step_times(value: Any, base: Base = None) -> StepTimes:
    """Milliseconds, or a mapping from the size of a pass to milliseconds. Raises ValueError."""
    points = value if isinstance(value, dict) else {1: value}
    points = {int(size) if isinstance(size, str) and size.isdecimal() else size: ms for size, ms in points.items()}
    for size, ms in points.items():
        if type(size) is not int or not 1 <= size <= 1 << 20:
            raise ValueError(f"must have sizes of passes from 1 to {1 << 20} as keys, not {shown(size)}")
        if type(ms) not in (int, float) or not math.isfinite(ms) or not 0 <= ms <= 60_000:
            raise ValueError(f"must be milliseconds from 0 to 60000, or such numbers by size, not {shown(ms)}")
    if not 1 <= len(points) <= 64:
        raise ValueError(f"must be 1 to 64 sizes of passes, not {len(points)}")
    return StepTimes(tuple(sorted((size, float(ms)) for size, ms in points.items())))


def write_step_times(times: StepTimes) -> Any:
    """As a topology file holds it."""
    return dict(times.points) if len(times.points) > 1 else times.points[0][1]


def cache_folder() -> Path:
    """Where fetched models are: ${PACELINE_CACHE}, else paceline in the user's cache folder."""
    own = os.environ.get("PACELINE_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "paceline")
    return Path(own).expanduser()


def expand(text: str, base: Base, keep: str = "") -> str:
    """`~` and `${NAME}` replaced; ${PACELINE_CACHE} is paceline in the user's cache folder unless set.

    keep: one that is left as it stands. Raises ValueError for a variable that is not set.
    """

    cache = str(cache_folder())

    def variable(match: re.Match[str]) -> str:
        name = match[1]
        if match[0] == keep:
            return keep
        value = os.environ.get(name) or (cache if name == "PACELINE_CACHE" else None)
        if value is None:
            raise ValueError(f"uses ${{{name}}}, but the environment variable {name} is not set")
        return value

    return os.path.expanduser(re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", variable, text))


def read_path(value: Any, base: Base = None, keep: str = "") -> Path:
    """A file, relative to the YAML file. keep: a variable that is left as it stands. Raises ValueError."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(f"must be the path of a file, not {shown(value)}")
    return Path(os.path.normpath((base or Path()) / expand(value, base, keep)))


def read_node_path(value: Any, base: Base = None) -> Path:
    """A file of a node: ${NODE} stays until the node is known. Raises ValueError."""
    return read_path(value, base, NODE)


def read_node_text(value: Any, base: Base = None) -> str:
    """Text in which ${NODE} stays until the node is known, and nothing else is a variable. Raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch(r"[^\x00-\x1f]{1,500}", value):
        raise ValueError(f"must be text, not {shown(value)}")
    if strange := re.search(r"\$\{.*?(\}|$)", value.replace(NODE, "")):
        raise ValueError(f"holds {strange[0]}; only {NODE}, the node's own name, is replaced here")
    return value


def read_model(value: Any, base: Base = None) -> str:
    """A bundle, a local path or a hub id. What is there beside the YAML file, or starts with /, ~ or ., is a path."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(f"must be a bundle, a local path or a hub id, not {shown(value)}")
    text = expand(value, base)
    path = read_path(value, base)
    if text.startswith(("/", "./", "../")) or text in (".", "..") or _exists(path):
        return str(path)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", text):
        raise ValueError(f"must be a bundle, a local path or a hub id; {shown(text)} is neither there nor a hub id")
    return text


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the file system
        return False


def read_flag(value: Any, base: Base = None) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"must be true or false, not {shown(value)}")


def shown(value: Any) -> str:
    """A value as the message quotes it: short, on one line."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return repr(text) if isinstance(value, str) else text


def listed(values: tuple[str, ...]) -> str:
    """a, b or c."""
    return " or ".join([", ".join(values[:-1]), values[-1]]) if len(values) > 1 else "".join(values)


def did_you_mean(value: Any, allowed: tuple[str, ...]) -> str:
    """`; did you mean x?` when something is close, else nothing."""
    import difflib

    near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


Count = Annotated[int, integer(1, 65536)]
Tokens = Annotated[int, integer(1, 16_777_216)]
Threads = Annotated[int, integer(1, 1024)]
Lanes = Annotated[int | Literal["auto"], integer(1, 8, auto=True)]
DraftLength = Annotated[int | Literal["auto"], integer(0, 16, auto=True)]
DraftAhead = Annotated[int, integer(0, 16)]
Weight = Annotated[float, number(0.001, 1000)]
Share = Annotated[float, number(0, 1)]
Milliseconds = Annotated[float, number(0, 60_000)]
StepMilliseconds = Annotated[
    StepTimes,
    Rule(
        read_step_times,
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": 60_000},
                {"type": "object", "additionalProperties": {"type": "number", "minimum": 0, "maximum": 60_000}},
            ],
            "examples": [2.0, {1: 10.0, 8: 12.5, 64: 31.0}],
        },
        write=write_step_times,
    ),
]
Flag = Annotated[bool, Rule(read_flag, {"type": "boolean"})]
Size = Annotated[int, Rule(read_size, {"type": ["string", "integer"], "examples": ["2GiB", "512MiB"]})]
Seconds = Annotated[float, Rule(read_seconds, {"type": ["number", "string"], "examples": [0.2, "200ms"]})]
Listen = Annotated[Address, Rule(read_address, {"type": "string", "examples": ["127.0.0.1:7070"]}, as_text=True)]
FolderPath = Annotated[Path, Rule(read_path, {"type": "string"}, as_text=True)]
FilePath = Annotated[Path, Rule(read_path, {"type": "string"}, as_text=True)]
ModelName = Annotated[str, Rule(read_model, {"type": "string", "examples": ["bundles/qwen3-0.6b", "Qwen/Qwen3-8B"]})]
Name = Annotated[
    str, pattern(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "a name of letters, digits, dots and dashes (at most 63)")
]
NodeFilePath = Annotated[Path, Rule(read_node_path, {"type": "string"}, as_text=True)]
NodeText = Annotated[str, Rule(read_node_text, {"type": "string", "examples": [NODE]})]
Text = Annotated[str, pattern(r"[^\x00-\x1f]{1,500}", "text")]
_HOST = _HOST_NAME + r"|(?=.{2,45}$)[0-9a-fA-F:]*:[0-9a-fA-F:.]*"
HostAddress = Annotated[str, pattern(_HOST, "a host name or an IP address")]
Device = Annotated[str, pattern(r"cpu|cuda(:[0-9]{1,2})?", "cpu, cuda or cuda:0")]
Broker = Annotated[str, pattern(r"mqtts?://[A-Za-z0-9._:\[\]-]+", "mqtt://host:port or mqtts://host:port")]
