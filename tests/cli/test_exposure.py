"""Servers without security say so where other machines can reach them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from metamq.security.exposure import is_exposed
from tests.cli.conftest import Metamq
from tests.one_zookeeper import cluster
from tests.parts import LocalBroker

WARNING = "security is off: any client that reaches 0.0.0.0:"


@pytest.mark.parametrize(
    ("host", "exposed"),
    [
        ("127.0.0.1", False), ("127.8.8.8", False), ("::1", False), ("[::1]", False), ("localhost", False),
        ("LOCALHOST.", False), ("::ffff:127.0.0.1", False),
        ("0.0.0.0", True), ("::", True), ("10.0.0.1", True), ("broker-0", True), ("", True),
    ],
)  # fmt: skip
def test_the_loopback_is_for_this_machine(host: str, exposed: bool) -> None:
    assert is_exposed(host) is exposed


def test_a_broker_warns_at_its_start_and_doctor_later(
    offline: Metamq, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster() as running, caplog.at_level(logging.WARNING, "metamq.broker"):
        here = ("--zookeeper", running.zookeeper)

        def found() -> tuple[str, str]:
            (finding,) = [one for one in offline("doctor", "-o", "json", *here).json if one["what"] == "security"]
            return finding["status"], finding["detail"]

        assert found() == ("ok", "off, and clients use only addresses of this machine")
        assert WARNING not in caplog.text
        with LocalBroker(running.zookeeper, tmp_path / "b", id=5, host="0.0.0.0", advertise="localhost,b5.example"):
            assert WARNING in caplog.text
            assert "`metamq security init`" in caplog.text
            assert found() == ("warning", "off: any client that reaches b5.example may read and change everything")
