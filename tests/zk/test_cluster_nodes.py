"""All that lasts below a root: exported, and restored, whatever interrupts it and whoever else writes there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from metamq.errors import ConfigError
from metamq.zk.cluster import cluster_nodes
from metamq.zk.cluster.brokers import BrokerState, known_cluster_id, state_json
from metamq.zk.cluster.cluster_nodes import ClusterExport, compare, export_cluster, restore_cluster
from metamq.zk.cluster.topics import TopicConfig, to_json
from metamq.zk.errors import ConnectionLost
from metamq.zk.groups.ownership import CommittedOffset, NotYet, claim, reset_offset
from metamq.zk.groups.plans import Plan, PlanInputs, read_plan, store_plan
from metamq.zk.partitions import TopicPartition
from metamq.zk.session.session import Session

ID = "0123456789abcdef"
NODES = {
    "/brokers/ids/0/state": state_json(BrokerState(7, 0, ((0, 1),), 1)),
    "/brokers/ids/0/had-slaves": b"",
    **{f"/config/topics/topic-{n}": to_json(TopicConfig(f"topic-{n}", {0: 1}, f"{n:016x}")) for n in range(6)},
    "/consumers/readers/offsets/topic-1/0-0": json.dumps(
        {"next": 17, "epoch": 7, "topic_id": f"{1:016x}", "generation": 1, "consumer": "x"}
    ).encode(),
    "/spark/sink/4": b'{"some": "decision"}',
    "/consumers/grüße \N{SNOWMAN} {odd}/offsets/a.b-c_d/0-0": b"\xff\x00binary",
}


@pytest.fixture
def other(servers: str) -> str:
    return f"{servers}/other"


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


async def opened(servers: str) -> Session:
    return await Session.open(servers, make_chroot=True)


def test_what_is_exported_is_restored_byte_by_byte_and_ephemeral_nodes_are_not(servers: str, other: str) -> None:
    async def work() -> None:
        async with await opened(servers) as session, await opened(other) as empty:
            assert await restore_cluster(session, ID, NODES)
            await session.create("/meta/brokers/ids/0/master", b"{}", ephemeral=True)
            await session.create("/meta/consumers/readers/owners/topic-1/0-0", b"x", ephemeral=True, makepath=True)
            text = json.dumps((await export_cluster(session)).to_json())
            export = ClusterExport.from_json(text, "it")
            assert (export.cluster_id, export.nodes, export.moved) == (ID, NODES, ())
            assert await restore_cluster(empty, ID, export.nodes)
            assert (await export_cluster(empty)).nodes == NODES
            assert await known_cluster_id(empty) == ID
            assert not await restore_cluster(empty, ID, export.nodes), "a second time there is nothing to do"

    run(work)


def test_an_export_says_what_changed_while_it_was_read(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with await opened(servers) as session:
            await restore_cluster(session, ID, NODES)
            read_tree = cluster_nodes._read_tree

            async def and_changed(of: Session) -> Any:
                found = await read_tree(of)
                monkeypatch.setattr(cluster_nodes, "_read_tree", read_tree)
                await of.set("/meta/spark/sink/4", b"later", -1)
                await of.delete("/meta/config/topics/topic-5", -1)
                await of.create("/meta/consumers/readers/ids/me", b"{}", ephemeral=True, makepath=True)
                return found

            monkeypatch.setattr(cluster_nodes, "_read_tree", and_changed)
            export = await export_cluster(session)
            assert export.moved == ("/config/topics/topic-5", "/spark/sink/4")
            assert export.nodes["/spark/sink/4"] == b"later"

    run(work)


class Interrupted(Session):
    """Loses its connection at the n-th write, which was done all the same, or was not."""

    left = 1 << 30
    is_done = False

    async def _write(self, write: Callable[[], Awaitable[Any]]) -> Any:
        self.left -= 1
        if self.left < 0:
            if self.is_done:
                await write()
            self.left = 1 << 30
            raise ConnectionLost(self.servers, "cut by the test")
        return await write()

    async def create(self, path: str, data: bytes = b"", **settings: Any) -> Any:  # type: ignore[override]
        return await self._write(lambda: super(Interrupted, self).create(path, data, **settings))

    async def set(self, path: str, data: bytes, version: int) -> Any:
        return await self._write(lambda: super(Interrupted, self).set(path, data, version))

    async def multi(self, operations: Any) -> Any:
        return await self._write(lambda: super(Interrupted, self).multi(operations))


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True])
def test_interrupted_at_any_write_no_broker_joins_and_it_can_be_run_again(
    servers: str, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_nodes, "CHUNK_OPERATIONS", 3)
    other_inputs = {path: data for path, data in NODES.items() if not path.endswith("topic-3")}
    other_inputs["/brokers/ids/0/state"] = state_json(BrokerState(9, 1, ((1, 4),), 2))

    async def attempt(number: int) -> bool:
        """Whether it was interrupted."""
        async with await Interrupted.open(f"{servers}/{number}", make_chroot=True) as session:
            assert isinstance(session, Interrupted)
            session.left, session.is_done = number, is_done
            try:
                await restore_cluster(session, ID, NODES)
            except ConnectionLost:
                was_interrupted = True
            else:
                return False
            node = await session.get_or_none(session.paths.cluster())
            if node is not None and node.data == ID.encode():
                assert (await export_cluster(session)).nodes == NODES, "the id is written last"
            else:
                if node is not None:
                    with pytest.raises(ConfigError, match=f"the restore of cluster {ID} in this ZooKeeper is not fin"):
                        await known_cluster_id(session)
                assert await restore_cluster(session, ID, other_inputs)
                assert (await export_cluster(session)).nodes == other_inputs
            return was_interrupted

    async def work() -> None:
        interrupted = 0
        while await attempt(interrupted):
            interrupted += 1
        assert interrupted > len(NODES) / 3 + 1

    run(work)


def test_what_contradicts_a_restore_is_named_and_left_alone(servers: str) -> None:
    async def work() -> None:
        async with await opened(servers) as session:
            await session.create("/meta/config/topics/precious", b"{}", makepath=True)
            with pytest.raises(ConfigError, match=r"there are other nodes below /meta .*: /config/topics/precious"):
                await restore_cluster(session, ID, NODES)
            assert await known_cluster_id(session) is None
        async with await opened(f"{servers}/b") as session:
            await session.create("/meta/cluster", b"another", makepath=True)
            with pytest.raises(ConfigError, match=f"another cluster below /meta .*: another, not {ID}"):
                await restore_cluster(session, ID, NODES)
        async with await opened(f"{servers}/c") as session:
            await session.create("/meta/cluster", ID.encode(), makepath=True)
            with pytest.raises(ConfigError, match=f"cluster {ID} already exists .* lacks /brokers/ids/0/had-slaves"):
                await restore_cluster(session, ID, NODES)

    run(work)


def test_members_and_sinks_that_run_meanwhile_are_no_other_cluster(servers: str) -> None:
    """A member that claimed a partition before its offset was restored learns that it has to claim anew."""
    tp = TopicPartition("topic-1", "0-0")

    async def work() -> None:
        async with await opened(servers) as session:
            await session.create("/meta/consumers/readers/ids/me", b"{}", ephemeral=True, makepath=True)
            plan = Plan(1, "range", PlanInputs({}, {}), {})
            assert await store_plan(session, "readers", plan, None)
            await session.create("/meta/spark/sink", b"made anew", makepath=True)
            nodes = {**NODES, "/consumers/readers/plan": b"of yesterday", "/spark/sink": b"exported"}
            assert (await compare(session, ID, nodes)).operations
            held = await claim(session, "readers", tp, f"{1:016x}", "me", freed=lambda: None)
            assert not isinstance(held, NotYet)
            assert await restore_cluster(session, ID, nodes)
            stored = await read_plan(session, "readers")
            assert stored is not None
            assert stored.plan == plan, "members that live know better"
            export = await export_cluster(session)
            assert export.nodes["/spark/sink"] == b"exported"
            assert json.loads(export.nodes["/consumers/readers/offsets/topic-1/0-0"])["next"] == 17

    run(work)


def test_a_claim_between_the_writes_keeps_the_offset(servers: str) -> None:
    tp = TopicPartition("topic-1", "0-0")

    async def work() -> None:
        async with await opened(servers) as session:
            restored = {**NODES}
            await session.create("/meta/cluster", f"restoring:{ID}".encode(), makepath=True)
            await reset_offset(session, "readers", tp, CommittedOffset(17, 7, f"{1:016x}"))
            path = "/meta/consumers/readers/offsets/topic-1/0-0"
            before = await session.get(path)
            assert await restore_cluster(session, ID, restored)
            assert await session.get(path) == before

    run(work)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "metamq cluster export", "format": 2}', "\x00"])
def test_what_is_no_export_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"yesterday\.json is not the export of a cluster"):
        ClusterExport.from_json(text, "yesterday.json")
