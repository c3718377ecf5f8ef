"""How a package that is missing is brought: said here for every message that names one of Paceline's extras."""

from __future__ import annotations

from pathlib import Path

HOME = Path(__file__).resolve().parents[1]  # the repository, or the folder of an installed wheel


def install(extra: str | None = None) -> str:
    """The command that brings an extra, such as export (None: what everything needs), and where to run it.

    Paceline is on no package index: it is installed from its repository, in place, or, as on a provisioned Jetson, as a
    wheel.
    """
    brackets = f"[{extra}]" if extra else ""
    if (HOME / "pyproject.toml").is_file():
        return f"pip install -e '.{brackets}' in Paceline's repository"
    again = "; on a board that scripts/provision_jetson.sh set up, run that again" if extra == "jetson" else ""
    return f"pip install 'PACELINE{brackets}', PACELINE being its repository or its wheel{again}"
