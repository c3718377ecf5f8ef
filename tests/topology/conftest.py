"""All transports, one loop; brokers that live as long as the session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from paceline.topology.broker import mosquitto
from paceline.topology.links.base import Transport
from paceline.topology.links.memory import MemoryTransport
from paceline.topology.links.tcp import TcpTransport

from .links.brokers import BrokerProcess, running_broker


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["tcp", "memory", "mqtt"])
async def transport(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Transport]:
    if request.param == "mqtt":
        broker = request.getfixturevalue("mosquitto_broker" if mosquitto() else "amqtt_broker")
        made: Transport = broker.transport()
    else:
        made = TcpTransport() if request.param == "tcp" else MemoryTransport()
    yield made
    await made.close()


@pytest.fixture(scope="session")
def mosquitto_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running_broker("mosquitto", tmp_path_factory.mktemp("mosquitto")) as broker:
        yield broker


@pytest.fixture(scope="session")
def amqtt_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running_broker("amqtt", tmp_path_factory.mktemp("amqtt")) as broker:
        yield broker
