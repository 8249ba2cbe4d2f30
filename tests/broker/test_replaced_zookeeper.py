"""A running broker, and another ZooKeeper at the address of its own: what it lists there must not empty the disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from metamq import Admin, Producer
from metamq.broker.config import BrokerConfig
from metamq.broker.process.server import Broker
from metamq.broker.process.topic_reader import TopicReader
from metamq.client.settings import ClusterAccess
from metamq.errors import ConfigError, ConnectError
from metamq.zk.cluster.brokers import BrokerState, state_json
from metamq.zk.cluster.topics import TopicStore
from metamq.zk.nodes import Listing
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.session.session import Session

LIMIT_S = 60


async def another_cluster(session: Session) -> None:
    """A broker of the same id has been master here, and other topics are told of."""
    await session.create(session.paths.cluster(), b"another", makepath=True)
    state = BrokerState(epoch=1, master=0, insync=((0, 1),), generation=1)
    await session.create(session.paths.broker_state(0), state_json(state), makepath=True)
    await session.ensure(session.paths.topic_configs())


async def nothing(session: Session) -> None:
    """An empty one."""


Fill = Callable[[Session], Awaitable[None]]


class Scene:
    """A broker with a topic, and its ZooKeeper, which can be replaced."""

    def __init__(self, folder: Path, *, is_ahead: bool = True) -> None:
        self.folder = folder
        self.is_ahead = is_ahead
        self.zookeeper = EmbeddedZooKeeper(folder / "zk").start()
        config = BrokerConfig(
            data=str(folder / "data"), port=0, http_port=-1, disk_reserve_bytes=1 << 26, session_timeout_ms=6000
        )
        self.broker = Broker(config, ClusterAccess(self.zookeeper.address))

    async def begin(self) -> None:
        await self.broker.start()
        await asyncio.to_thread(self._fill)
        assert self.topics() == ["precious"]

    def _fill(self) -> None:
        with Admin(self.zookeeper.address) as admin, Producer(self.zookeeper.address) as producer:
            admin.create_topic("precious", partitions=1)
            producer.send("precious", b"x").result(60)

    def topics(self) -> list[str]:
        return sorted(path.name.partition("@")[0] for path in (self.folder / "data" / "topics").glob("[!~]*"))

    async def replace(self, fill: Fill) -> None:
        """Another ZooKeeper at the address; returns once the broker has a session there."""
        session, port = self.broker._session, self.zookeeper.port
        await asyncio.to_thread(self.zookeeper.stop)
        generation = session.generation  # no session ends any more before there is another ZooKeeper
        shutil.rmtree(self.folder / "zk")
        self.zookeeper = await asyncio.to_thread(EmbeddedZooKeeper(self.folder / "zk", port).start)
        async with await Session.open(self.zookeeper.address) as other:
            await fill(other)
            for number in range(100 if self.is_ahead else 0):  # else it refuses who has seen more
                await other.create(f"/filler{number}")
        async with asyncio.timeout(LIMIT_S):
            while session.generation == generation:
                await asyncio.sleep(0.01)
                await session.connected()

    async def made_there(self) -> list[str]:
        async with await Session.open(self.zookeeper.address) as session:
            paths = session.paths.cluster(), session.paths.topic_configs()
            return [path for path in paths if await session.exists(path) is not None]

    async def end(self) -> None:
        await self.broker.stop()
        await asyncio.to_thread(self.zookeeper.stop)


class ListedLate(TopicStore):
    """Lists the topics only once ZooKeeper has been replaced, after whatever was asked before."""

    scene: Scene
    fill: Fill | None

    async def listing(self, watch: Callable[[], None] | None = None) -> Listing:
        fill, self.fill = self.fill, None
        if fill is not None:
            await self.scene.replace(fill)
        return await super().listing(watch)


@pytest.mark.slow
@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("fill", [nothing, another_cluster])
def test_what_another_zookeeper_lists_removes_nothing(tmp_path: Path, fill: Fill, is_ahead: bool) -> None:
    async def run() -> None:
        scene = Scene(tmp_path, is_ahead=is_ahead)
        await scene.begin()
        try:
            await scene.replace(fill)
            with pytest.raises(
                ConfigError, match=r"(?s)belongs to cluster .*, but this ZooKeeper has (no c|cluster another)"
            ):
                await scene.broker._read_topics()
            async with asyncio.timeout(LIMIT_S):
                await scene.broker.wait()
            assert isinstance(scene.broker.failure, ConfigError)
            assert ("`metamq cluster restore`" in str(scene.broker.failure)) == (fill is nothing)
            assert await scene.made_there() == [] or fill is another_cluster
        finally:
            await scene.end()
        assert scene.topics() == ["precious"]

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("fill", [nothing, another_cluster])
def test_a_list_from_another_session_than_the_clusters_id_changes_nothing(tmp_path: Path, fill: Fill) -> None:
    async def run() -> None:
        scene = Scene(tmp_path)
        await scene.begin()
        try:
            store = ListedLate(scene.broker._session)
            store.scene, store.fill = scene, fill
            scene.broker._reader = TopicReader(scene.broker._session, store, scene.broker._topics_changed.set)
            with pytest.raises(ConnectError, match="the session ended meanwhile"):
                await scene.broker._read_topics()
        finally:
            await scene.end()
        assert scene.topics() == ["precious"]

    asyncio.run(run())
