"""Channels over an MQTT broker, for targets and drafters that cannot reach one another but both reach it.

Topics are PREFIX/DEPLOYMENT/DRAFTER/{in,out}/TARGET: a target publishes to `in` and reads `out`. A channel
begins with Open → Accept, so a dial that succeeds has heard the drafter. Each node's presence is a retained
word with a last will (mqtt_presence.py); a node that is gone ends its channels at the other ends.
The transport keeps one connection to the broker, and makes a new one whenever it is lost: a life (mqtt_life.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from paceline.core.errors import LinkClosed, UserError
from paceline.topology.links.base import Channel, Listener
from paceline.topology.links.mqtt_client import BrokerRefused, client_name, connect
from paceline.topology.links.mqtt_life import ANSWER_SECONDS, Life, Place
from paceline.topology.links.mqtt_paho import MQTT_5
from paceline.topology.links.words import words
from paceline.topology.peer import Backoff

log = logging.getLogger(__name__)

LONGEST_RETRY_SECONDS = 0.5  # targets wait for their next dial on top of it
START_SECONDS = 3.0  # a listener waits so long for the broker, then goes on without


class MqttListener:
    """A drafter that accepts."""

    def __init__(self, transport: MqttTransport, address: str, on_channel: Callable[[Channel], None]) -> None:
        self.address = address
        self.on_channel = on_channel
        self._transport = transport

    async def close(self) -> None:
        self._transport.unlisten(self)


class MqttTransport:
    """One node's client of a broker."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._listeners: dict[str, MqttListener] = {}
        self._subscriptions: set[str] = set()
        self._version = MQTT_5  # that the broker spoke last
        self._life: Life | None = None  # while connected
        self._keeper: asyncio.Task[None] | None = None
        self._trouble: LinkClosed | None = None  # why there is no connection, once an attempt has failed
        self._changed = asyncio.Event()  # of the two above

    async def dial(self, address: str, name: str | None = None) -> Channel:
        until = asyncio.get_running_loop().time() + ANSWER_SECONDS
        life = await self._connected(ANSWER_SECONDS, through_trouble=True)
        return await life.dial(address, until)

    async def listen(self, address: str, on_channel: Callable[[Channel], None]) -> Listener:
        if address in self._listeners:
            raise UserError(f"{address} is in use: choose another name")
        listener = self._listeners[address] = MqttListener(self, address, on_channel)
        self._subscriptions.add(self.place.topic(address, "in", "+"))
        try:
            life = await self._connected(START_SECONDS)
            await life.subscribe(self.place.topic(address, "in", "+"))
            life.announce()
        except BrokerRefused as refusal:
            raise UserError(str(refusal)) from None
        except LinkClosed as loss:  # a broker may start later than those who use it
            log.warning("%s listens as soon as there is a broker: %s", address, loss, extra={"event": "no_broker"})
        return listener

    def unlisten(self, listener: MqttListener) -> None:
        """Accepts no more channels, and ends those that it accepted."""
        if self._listeners.pop(listener.address, None) is not None and self._life is not None:
            self._subscriptions.discard(self.place.topic(listener.address, "in", "+"))
            self._life.unlisten(listener.address)

    async def close(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper

    # The connection.

    async def _connected(self, patience: float, through_trouble: bool = False) -> Life:
        """The life of the present connection. LinkClosed with the reason when there is none.

        through_trouble: waits for the next attempts, too, unless somebody has to put the trouble right first.
        """
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name="mqtt")
        until = asyncio.get_running_loop().time() + patience
        passing = through_trouble and not isinstance(self._trouble, BrokerRefused)
        while self._life is None and (self._trouble is None or passing):
            try:
                await asyncio.wait_for(self._changed.wait(), until - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                break
            passing = through_trouble and not isinstance(self._trouble, BrokerRefused)
        if self._life is not None:
            return self._life
        if self._trouble is not None:
            raise type(self._trouble)(str(self._trouble))
        raise LinkClosed(f"no answer yet from the broker {self.place.broker.url}")

    async def _keep(self) -> None:
        """Connects again and again until cancelled."""
        backoff = Backoff(longest=LONGEST_RETRY_SECONDS)
        while True:
            try:
                await self._live_once(backoff)
            except Exception as error:  # whatever ended it, the next attempt may do better
                self._lost(error)
            self._wake()
            await asyncio.sleep(backoff.pause())

    async def _live_once(self, backoff: Backoff) -> None:
        place = self.place
        life = Life(place, self._listeners)
        client_id = client_name(place.deployment, place.node)
        connection = await connect(place.broker, client_id, life.will, life.on_message, self._version)
        self._version = connection.version
        try:
            await life.begin(connection, self._subscriptions)
            self._life, self._trouble = life, None
            backoff.reset()
            log.info("connected to the broker %s", place.broker.url, extra={"event": "broker_up"})
            self._wake()
            raise LinkClosed(await asyncio.shield(connection.ended))
        except asyncio.CancelledError:
            life.leave()
            raise
        finally:
            self._life = None
            try:
                life.end(connection.ended.result() if connection.ended.done() else "this node leaves the broker")
            finally:
                await connection.close()

    def _lost(self, error: Exception) -> None:
        """Says so once, with its place in the code where it is not of the expected kind."""
        url = self.place.broker.url
        loss = error if isinstance(error, LinkClosed) else LinkClosed(f"cannot use the broker {url}: {words(error)}")
        if str(self._trouble) != str(loss):
            extra = {"event": "broker_down", "reason": str(loss)}
            log.warning("%s", loss, extra=extra, exc_info=None if loss is error else error)
        self._trouble = loss

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
