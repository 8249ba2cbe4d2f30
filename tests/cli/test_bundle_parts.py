"""The parts of `metamq bundle`: a part that fails or hangs keeps what it has, and takes nothing from the others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from metamq.cli.support.parcel import LeftOut, Parcel, SupportPart, collect_all, in_thread
from metamq.cli.support.status_parts import parse_status
from metamq.errors import ConnectError


def test_a_part_keeps_what_it_has() -> None:
    done: list[int] = []

    async def slow(parcel: Parcel) -> None:
        parcel.files["early"] = "here"
        await asyncio.Event().wait()

    async def hanging(parcel: Parcel) -> None:
        await in_thread(lambda: time.sleep(3600))

    async def failing(parcel: Parcel) -> None:
        parcel.files["early"] = "here"
        raise ConnectError("broker 0", "it is gone")

    async def inner(parcel: Parcel) -> None:
        await in_thread(Path("/nowhere/at/all").read_bytes)

    async def wrong(parcel: Parcel) -> None:
        raise KeyError("x")

    async def socket_timeout(parcel: Parcel) -> None:
        raise TimeoutError("timed out")

    async def elsewhere(parcel: Parcel) -> None:
        raise LeftOut("not here")

    works = (slow, hanging, failing, inner, wrong, socket_timeout, elsewhere)
    parts = [SupportPart(work.__name__, "", work) for work in works]
    found = asyncio.run(collect_all(parts, 0.3, done.append))
    assert [one.part for one in found] == [part.name for part in parts]
    assert [one.problems for one in found] == [
        ["not complete after 0.3 s"],
        ["not complete after 0.3 s"],
        ["no connection to broker 0: it is gone"],
        ["/nowhere/at/all: No such file or directory"],
        ["internal error: KeyError('x')"],
        ["timed out"],
        [],
    ]
    assert found[-1].left_out == "not here"
    assert (found[0].files, found[2].files) == ({"early": "here"}, {"early": "here"})
    assert len(done) == len(parts)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("broker-0:8120", "http://broker-0:8120"),
        ("https://broker-0:8120/metrics", "https://broker-0:8120"),
        ("http://[::1]:8120", "http://[::1]:8120"),
    ],
)
def test_addresses_of_status_ports(text: str, address: str) -> None:
    assert parse_status(text) == address


@pytest.mark.parametrize("text", ["", "broker-0", "ftp://broker-0:1", "http://ann:x@broker-0:1", "a:b", "a:999999"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not the address of a status port"):
        parse_status(text)
