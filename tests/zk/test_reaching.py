"""The way to the first connection: what is said while there is none, why, and when it is given up."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from metamq.errors import ConfigError, ConnectError
from metamq.zk.server.embedded import EmbeddedZooKeeper
from metamq.zk.server.ports import free_port
from metamq.zk.session import session as session_module
from metamq.zk.session.session import Session
from tests.zk.listeners import black_hole, talker

Until = Callable[..., Awaitable[None]]


def test_nobody_at_the_address(until: Until) -> None:
    async def main() -> None:
        threads = set(threading.enumerate())
        address = f"127.0.0.1:{free_port()}"
        for limit_s in (1, 10, 30):  # on a machine under load there may be no attempt within a second
            with pytest.raises(ConnectError) as failure:
                await Session.open(address, connect_timeout_s=limit_s)
            if "no answer yet" not in failure.value.problem:
                break
        wanted = f"no connection to ZooKeeper at {address}: connection refused, tried for {limit_s} s"
        assert failure.value.problem == wanted
        assert "metamq up" in failure.value.hint
        assert "METAMQ_ZOOKEEPER" in failure.value.hint
        await until(lambda: set(threading.enumerate()) == threads)
        with pytest.raises(ConfigError):
            await Session.open("zk:x")
        with pytest.raises(ConfigError):
            await Session.open(address, timeout_ms=0)
        with pytest.raises(ConfigError):
            await Session.open(address, root="meta")
        assert set(threading.enumerate()) == threads

    asyncio.run(main())


@pytest.mark.slow
def test_why_there_is_no_connection_is_told() -> None:
    refusing = f"127.0.0.1:{free_port()}"

    async def why(address: str, limit_s: float) -> str:
        with pytest.raises(ConnectError) as failure:
            await Session.open(address, timeout_ms=1_000, connect_timeout_s=limit_s)
        assert failure.value.address == f"ZooKeeper at {address}"
        return failure.value.reason.removesuffix(f", tried for {limit_s:g} s")

    async def reasons_within(limit_s: float) -> list[str]:
        with black_hole() as dark, talker(None) as mute, talker(b"") as closing, talker(b"HTTP/1.1 400 No\r\n") as web:
            dark_address, mixed = f"127.0.0.1:{dark}", f"zk.invalid:2181,{refusing}"
            places = (
                "zk.invalid:2181",
                f"127.0.0.1:{mute}",
                f"127.0.0.1:{closing}",
                f"127.0.0.1:{web}",
                f"{refusing},{dark_address}/chroot",
                mixed,
            )
            reasons = await asyncio.gather(*(why(place, limit_s) for place in places))
        return [reason.replace(dark_address, "DARK") for reason in reasons]

    wanted = [
        "name not resolved",
        "no answer",
        "it closed the connection",
        "it closed the connection",
        f"{refusing} connection refused, DARK no answer",
        f"zk.invalid:2181 name not resolved, {refusing} connection refused",
    ]
    for limit_s in (1.5, 10, 30):  # on a machine under load not all may have been tried at first
        if asyncio.run(reasons_within(limit_s)) == wanted:
            return
    assert asyncio.run(reasons_within(30)) == wanted


def test_a_wait_for_zookeeper_is_told_after_a_moment(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(session_module, "WARN_AFTER_S", 0.5)
    monkeypatch.setattr(session_module, "WARN_AGAIN_S", 0.3)
    address = f"127.0.0.1:{free_port()}"

    def waits() -> list[str]:
        return [message for message in caplog.messages if message.startswith("waiting for ZooKeeper")]

    async def main() -> None:
        with caplog.at_level(logging.WARNING), pytest.raises(ConnectError):
            await Session.open(address, connect_timeout_s=0.3)
        assert waits() == []
        said = f"waiting for ZooKeeper at {address}: connection refused. Start one with `metamq up`"
        with caplog.at_level(logging.WARNING):
            began_s = time.monotonic()
            opening = asyncio.ensure_future(Session.open(address, connect_timeout_s=None))
            await until(lambda: sum(told.startswith(said) for told in waits()) >= 2)
            told_most = 1 + (time.monotonic() - began_s - 0.5) / 0.3
            opening.cancel()
            await asyncio.wait({opening})
        assert len(waits()) <= told_most

    asyncio.run(main())


def test_who_is_impatient_gives_up_once_every_server_refuses(zookeeper: EmbeddedZooKeeper) -> None:
    refusing = f"127.0.0.1:{free_port()}"

    async def main() -> None:
        for address in (refusing, f"{refusing},zk.invalid:2181"):
            with pytest.raises(ConnectError, match="connection refused") as failure:
                await Session.open(address, patient=False, connect_timeout_s=60)
            assert "tried for" not in failure.value.reason
        known = f"ZK.invalid,{refusing},{zookeeper.address}"
        await (await Session.open(known, patient=False, connect_timeout_s=60)).close()
        with black_hole() as dark, pytest.raises(ConnectError, match=r"no answer( yet)?, tried for 0\.5 s"):
            await Session.open(f"{refusing},127.0.0.1:{dark}", patient=False, connect_timeout_s=0.5)

    asyncio.run(main())


@pytest.mark.slow
def test_a_zookeeper_that_comes_later_is_waited_for_without_a_limit(victim: EmbeddedZooKeeper) -> None:
    async def main() -> None:
        victim.kill()
        opening = asyncio.ensure_future(Session.open(victim.address, connect_timeout_s=None))
        await asyncio.sleep(0)
        await asyncio.to_thread(victim.restart)
        await (await opening).close()

    asyncio.run(main())
