"""Who is at the broker: a retained word of each node on a topic of its own, which the broker takes back for it.

The word holds the node's state and a random instance, new with every connection, and is signed with the
deployment key. So a stranger cannot say it, and an old word of an earlier instance ends nothing.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from paceline.topology.links.mqtt_frames import derive

OFFLINE, ONLINE, LISTENING = "offline", "online", "listening"
INSTANCE_BYTES = 8


@dataclass(frozen=True)
class Presence:
    """What a node says of itself. listening: it accepts channels."""

    state: str
    instance: bytes


def encode(presence: Presence, key: bytes, topic: str) -> bytes:
    """In words that a person with a broker's tools can read."""
    return f"{presence.state} {presence.instance.hex()} {_signature(presence, key, topic)}".encode()


def decode(payload: bytes, key: bytes, topic: str) -> Presence | None:
    """None for what was not signed with this key for this topic."""
    try:
        state, instance, signature = payload.decode("ascii").split(" ")
        presence = Presence(state, bytes.fromhex(instance))
    except ValueError:
        return None
    genuine = hmac.compare_digest(signature.encode(), _signature(presence, key, topic).encode())
    return presence if genuine and len(presence.instance) == INSTANCE_BYTES else None


def _signature(presence: Presence, key: bytes, topic: str) -> str:
    return derive(key, b"presence", topic.encode(), presence.state.encode(), presence.instance)[:16].hex()
