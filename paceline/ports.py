"""Whether this machine's nodes can listen where the topology has them listen, before any is started."""

from __future__ import annotations

import errno
import socket

from paceline.core.errors import UserError
from paceline.topology.spec import Address, Topology

IN_USE = "in use"


def require_free(topology: Topology, *, with_drafters: bool = True) -> None:
    """Raises UserError that names every port in use, of all nodes of the topology."""
    places = [(target.api.listen, target.name) for target in topology.targets]
    if with_drafters and topology.link.transport == "tcp":
        places = [*((drafter.listen, drafter.name) for drafter in topology.drafters), *places]
    taken = [f"{listen} ({name})" for listen, name in places if trouble(listen) == IN_USE]
    if taken:
        are, it = ("is", "it") if len(taken) == 1 else ("are", "them")
        raise UserError(f"{', '.join(taken)} {are} in use: stop what uses {it}, such as a running `paceline up`")


def trouble(listen: Address) -> str | None:
    """Why nothing can listen there, or None."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(place)
            server.listen(1)
    except UnicodeError:
        return "is no name that a host can have"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return IN_USE
        if error.errno == errno.EADDRNOTAVAIL:
            return "is no address of this machine"
        return error.strerror or str(error)
    return None
