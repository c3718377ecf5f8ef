"""A broker for one machine: mosquitto where it is installed, else amqtt, which pip can install anywhere.

It listens on loopback only and lets everybody there in: who may talk to whom is settled by the deployment key.
"""

from __future__ import annotations

import asyncio
import getpass
import importlib.util
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from paceline.core.errors import UserError
from paceline.core.extras import install
from paceline.topology.process import SUPERVISED, follow_parent, notify
from paceline.topology.spec_values import Address

BROKER_KIND = "PACELINE_BROKER"  # mosquitto or amqtt, instead of what is found
PATIENCE_SECONDS = 2  # amqtt: beyond a client's keep-alive; the standard wants half as long again
GOODBYE_SECONDS = 2.0
LOOK_SECONDS = 0.5


def broker_kind() -> str:
    """mosquitto or amqtt. Raises UserError when neither is there."""
    asked = os.environ.get(BROKER_KIND, "")
    if asked not in ("", "mosquitto", "amqtt"):
        raise UserError(f"{BROKER_KIND} must be mosquitto or amqtt, not {asked}")
    if asked in ("", "mosquitto") and mosquitto():
        return "mosquitto"
    if asked in ("", "amqtt") and importlib.util.find_spec("amqtt"):
        return "amqtt"
    wanted = {"mosquitto": "apt install mosquitto", "amqtt": install("broker")}
    ways = [way for kind, way in wanted.items() if asked in ("", kind)]
    raise UserError(f"local_broker needs {asked or 'mosquitto or amqtt'}; run: {' or '.join(ways)}")


def mosquitto() -> str | None:
    """Where the program is; Debian keeps it out of people's PATH."""
    return shutil.which("mosquitto", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin")))


def mosquitto_config(address: Address) -> str:
    """A broker without disk and without statistics; of each client it queues more than a burst of drafts."""
    return f"""listener {address.port} {address.host}
allow_anonymous true
set_tcp_nodelay true
persistence false
sys_interval 0
max_queued_messages 20000
user {getpass.getuser()}
log_dest stderr
log_type error
log_type warning
"""


def run_broker(address: Address, folder: Path) -> None:
    """Runs the broker until SIGTERM; says READY=1 once it accepts. `folder`: for its configuration."""
    kind = broker_kind()
    _check_free(address)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it has nothing to read again
    if kind == "amqtt":
        follow_parent()
        asyncio.run(run_amqtt(address, lambda: notify("READY=1")))
        return
    config = folder / "mosquitto.conf"
    config.write_text(mosquitto_config(address))
    if os.fork() == 0:
        _watch(address)
    program = mosquitto()
    assert program is not None
    os.execv(program, [program, "-c", str(config)])  # so that this process is the broker, for signals too


def _check_free(address: Address) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            why = os.strerror(error.errno or 0).lower()
            raise UserError(f"the broker cannot listen at {address}: {why}; is there one already?") from None


def _watch(address: Address) -> NoReturn:
    """The child of mosquitto that says when it is ready and ends it with the supervisor, as `follow_parent` does."""
    broker = os.getppid()
    while not _accepts(address) and os.getppid() == broker:
        time.sleep(0.01)
    notify("READY=1")
    supervised = [sys.stdin] if os.environ.get(SUPERVISED) else []
    while os.getppid() == broker:
        ready, _, _ = select.select(supervised, [], [], LOOK_SECONDS)
        if ready and not os.read(sys.stdin.fileno(), 4096):
            os.kill(broker, signal.SIGTERM)
            break
    os._exit(0)


def _accepts(address: Address) -> bool:
    try:
        socket.create_connection((address.host, address.port), timeout=LOOK_SECONDS).close()
    except (OSError, UnicodeError):
        return False
    return True


async def run_amqtt(address: Address, ready: Callable[[], None]) -> None:
    """amqtt in this process, until SIGTERM or SIGINT."""
    from amqtt.broker import Broker
    from amqtt.contexts import BrokerConfig, ListenerConfig

    logging.getLogger("amqtt").setLevel(logging.ERROR)  # it warns of each client that leaves without a word
    logging.getLogger("transitions").setLevel(logging.ERROR)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    config = BrokerConfig(
        listeners={"default": ListenerConfig(bind=str(address))},
        timeout_disconnect_delay=PATIENCE_SECONDS,
        plugins={"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
    )
    broker = Broker(config)
    await broker.start()
    ready()
    await stop.wait()
    # amqtt may wait for a client that is going away at the same moment, and for ever: it holds nothing worth that.
    last_word = threading.Timer(GOODBYE_SECONDS, os._exit, (0,))
    last_word.daemon = True
    last_word.start()
    await broker.shutdown()
