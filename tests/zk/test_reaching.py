"""The way to the first connection: what is said while there is none, why, and when it is given up."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from metamq.errors import ConfigError, ConnectError
from metamq.zk import session as session_module
from metamq.zk.embedded import EmbeddedZooKeeper
from metamq.zk.ports import free_port
from metamq.zk.session import Session
from tests.zk.listeners import black_hole, talker

Until = Callable[..., Awaitable[None]]


def test_nobody_at_the_address(until: Until) -> None:
    async def main() -> None:
        threads = set(threading.enumerate())
        address = f"127.0.0.1:{free_port()}"
        with pytest.raises(ConnectError) as failure:
            await Session.open(address, connect_timeout_s=1)
        assert failure.value.problem == f"no connection to ZooKeeper at {address}: connection refused, tried for 1 s"
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


def test_why_there_is_no_connection_is_told() -> None:
    refusing = f"127.0.0.1:{free_port()}"

    async def why(address: str) -> str:
        with pytest.raises(ConnectError) as failure:
            await Session.open(address, timeout_ms=1_000, connect_timeout_s=1.5)
        assert failure.value.address == f"ZooKeeper at {address}"
        return failure.value.reason.removesuffix(", tried for 1.5 s")

    async def main() -> None:
        with black_hole() as dark, talker(None) as mute, talker(b"") as closing, talker(b"HTTP/1.1 400 No\r\n") as web:
            dark_address, mixed = f"127.0.0.1:{dark}", f"zk.invalid:2181,{refusing}"
            reasons = await asyncio.gather(
                why("zk.invalid:2181"),
                why(f"127.0.0.1:{mute}"),
                why(f"127.0.0.1:{closing}"),
                why(f"127.0.0.1:{web}"),
                why(f"{refusing},{dark_address}/chroot"),
                why(mixed),
            )
        assert reasons == [
            "name not resolved",
            "no answer",
            "it closed the connection",
            "it closed the connection",
            f"{refusing} connection refused, {dark_address} no answer",
            f"zk.invalid:2181 name not resolved, {refusing} connection refused",
        ]

    asyncio.run(main())


def test_a_wait_for_zookeeper_is_told_after_a_moment(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "TELL_AFTER_S", 0.5)
    monkeypatch.setattr(session_module, "TELL_AGAIN_S", 0.3)
    address = f"127.0.0.1:{free_port()}"

    async def main() -> None:
        with caplog.at_level(logging.WARNING), pytest.raises(ConnectError):
            await Session.open(address, connect_timeout_s=0.3)
        assert caplog.messages == []
        with caplog.at_level(logging.WARNING), pytest.raises(ConnectError):
            await Session.open(address, connect_timeout_s=1.3)
        assert 2 <= len(caplog.messages) <= 3
        (told,) = set(caplog.messages)
        assert told.startswith(f"waiting for ZooKeeper at {address}: connection refused. Start one with `metamq up`")

    asyncio.run(main())


def test_who_is_impatient_gives_up_once_every_server_refuses(zookeeper: EmbeddedZooKeeper) -> None:
    refusing = f"127.0.0.1:{free_port()}"

    async def main() -> None:
        for address in (refusing, f"{refusing},zk.invalid:2181"):
            started = time.monotonic()
            with pytest.raises(ConnectError, match="connection refused"):
                await Session.open(address, patient=False)
            assert time.monotonic() - started < 5  # of 10
        await (await Session.open(f"ZK.invalid,{refusing},{zookeeper.address}", patient=False)).close()
        with black_hole() as dark, pytest.raises(ConnectError, match=r"no answer yet, tried for 0\.5 s"):
            await Session.open(f"{refusing},127.0.0.1:{dark}", patient=False, connect_timeout_s=0.5)

    asyncio.run(main())


def test_a_zookeeper_that_comes_later_is_waited_for_without_a_limit(victim: EmbeddedZooKeeper) -> None:
    async def main() -> None:
        victim.kill()
        opening = asyncio.ensure_future(Session.open(victim.address, connect_timeout_s=None))
        await asyncio.sleep(0)
        await asyncio.to_thread(victim.restart)
        await (await opening).close()

    asyncio.run(main())
