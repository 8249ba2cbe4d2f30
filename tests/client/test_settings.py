"""Settings from the file, the environment and arguments: which one counts, and that no typing error passes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from metamq import Admin, Consumer, Producer, aio
from metamq.broker.config import BrokerConfig
from metamq.client.settings import load, read_file, zookeeper_root, zookeeper_servers
from metamq.errors import ConfigError
from metamq.testing import Cluster
from metamq.tx import XAResource
from metamq.tx import aio as aio_tx


@dataclass(frozen=True)
class Kitchen:
    """What a section may hold."""

    guests: int = 1
    warm: bool = False


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("METAMQ_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metamq.toml"


def test_a_later_one_wins(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    assert load(Kitchen, "consumer", arguments={}) == Kitchen()
    file.write_text("[consumer]\nguests = 2\nwarm = true\n")
    assert load(Kitchen, "consumer", file=file, arguments={}) == Kitchen(2, True)
    monkeypatch.setenv("METAMQ_CONFIG", str(file))
    monkeypatch.setenv("METAMQ_CONSUMER_GUESTS", "3")
    assert load(Kitchen, "consumer", arguments={"warm": None}) == Kitchen(3, True)
    assert load(Kitchen, "consumer", arguments={"guests": 4, "warm": False}) == Kitchen(4, False)


def test_zookeeper_and_root_from_the_same_three_places(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    assert (zookeeper_servers(None), zookeeper_root(None)) == ("127.0.0.1:2181", "/meta")
    file.write_text("zookeeper = 'a:1'\nroot = '/file'\n")
    assert (zookeeper_servers(None, file), zookeeper_root(None, file)) == ("a:1", "/file")
    monkeypatch.setenv("METAMQ_CONFIG", str(file))
    monkeypatch.setenv("METAMQ_ZOOKEEPER", "b:1")
    monkeypatch.setenv("METAMQ_ROOT", "/environment")
    assert (zookeeper_servers(None), zookeeper_root(None)) == ("b:1", "/environment")
    assert (zookeeper_servers("c:1"), zookeeper_root("/argument")) == ("c:1", "/argument")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[consumer]\nguest = 2", r"unknown setting 'guest' in \[consumer\] of .*toml\. Did you mean 'guests'\?"),
        ("zookeper = 'a'", r"unknown setting 'zookeper' in .*toml\. Did you mean 'zookeeper'\?"),
        ("[brokr]\nport = 1", r"unknown setting 'brokr' in .*toml\. Did you mean 'broker'\?"),
        ("zookeeper = 1", r"zookeeper in .*toml must be a string like 'zk1:2181,zk2:2181/chroot', not 1"),
        ("root = 1", r"root in .*toml must be a string like '/meta', not 1"),
        ("broker = 1", r"'broker' in .*toml must be a table, \[broker\]"),
    ],
)
def test_a_wrong_file_is_refused(file: Path, text: str, said: str) -> None:
    file.write_text(text)

    def read_all() -> None:
        load(Kitchen, "consumer", file=file, arguments={})
        zookeeper_servers(None, file)
        zookeeper_root(None, file)
        load(BrokerConfig, "broker", file=file, arguments={})

    with pytest.raises(ConfigError, match=said):
        read_all()


def test_a_misspelt_argument_is_named_with_its_like_be_it_a_setting_or_not() -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (Producer, {"linger": 3}, "linger_ms"),
        (Producer, {"on_ful": "raise"}, "on_full"),
        (Producer, {"zookeper": "x"}, "zookeeper"),
        (aio.Producer, {"encod": bytes}, "encode"),
        (Consumer, {"topics": "t", "grup": "g"}, "group"),
        (aio.Consumer, {"topics": "t", "fetch_wait": 1}, "fetch_wait_ms"),
        (XAResource, {"zookeper": "x"}, "zookeeper"),
        (aio_tx.XAResource, {"batch_byte": 1}, "batch_bytes"),
    ]
    for cls, arguments, meant in wrong:
        with pytest.raises(ConfigError, match=f"in the arguments. Did you mean '{meant}'"):
            cls(**arguments)
    with pytest.raises(TypeError, match="zookeper"):
        Admin(zookeper="x")  # type: ignore[call-arg]


def test_wrong_types_are_named_with_what_they_must_be(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    with pytest.raises(TypeError, match="`guests` must be a whole number, not '2'"):
        load(Kitchen, "consumer", arguments={"guests": "2"})
    with pytest.raises(TypeError, match="`warm` must be true or false, not 1"):
        load(Kitchen, "consumer", arguments={"warm": 1})
    file.write_text("[broker]\nretention_check_s = 'often'\n")
    with pytest.raises(ConfigError, match=r"retention_check_s in .* must be a number of seconds, not 'often'"):
        load(BrokerConfig, "broker", file=file, arguments={})
    monkeypatch.setenv("METAMQ_BROKER_DRAIN_TIMEOUT_S", "long")
    with pytest.raises(ConfigError, match="METAMQ_BROKER_DRAIN_TIMEOUT_S must be a number of seconds, not 'long'"):
        load(BrokerConfig, "broker", arguments={})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("METAMQ_BROKER_PROT", "METAMQ_BROKER_PORT"),
        ("METAMQ_BROKER_ADVERTISED", "METAMQ_BROKER_ADVERTISE"),
        ("METAMQ_BORKER_HTTP_PORT", "METAMQ_BROKER_HTTP_PORT"),
        ("METAMQ_ZOOKEPER", "METAMQ_ZOOKEEPER"),
        ("METAMQ_CONFG", "METAMQ_CONFIG"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_one_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, "1")
    said = f"unknown setting '{name}' in the environment. Did you mean '{meant}'?"
    with pytest.raises(ConfigError) as caught:
        load(BrokerConfig, "broker", arguments={})
    assert str(caught.value) == said
    if "_BROKER_" not in meant:  # else it is no business of a client's
        with pytest.raises(ConfigError) as caught:
            zookeeper_servers(None)
        assert str(caught.value) == said


def test_a_variable_like_no_other_gets_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAMQ_BROKER_XYZ", "1")
    with pytest.raises(ConfigError, match=r"'METAMQ_BROKER_XYZ' in the environment\. Known: METAMQ_BROKER_ADVERTISE, "):
        load(BrokerConfig, "broker", arguments={})


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the tests and the containers, of other sections, and of a Kubernetes Service of the name metamq."""
    for name in (
        "METAMQ_TEST_WORKERS", "METAMQ_ADVERTISE", "METAMQ_JAVA", "METAMQ_MAVEN", "METAMQ_ZOOKEEPER_JARS",
        "METAMQ_PRODUCER_LINGER", "METAMQ_PORT", "METAMQ_SERVICE_HOST", "METAMQ_SERVICE_PORT",
        "METAMQ_PORT_8123_TCP", "METAMQ_PORT_8123_TCP_ADDR", "METAMQ_HOME",
    ):  # fmt: skip
        monkeypatch.setenv(name, "tcp://10.0.0.1:8123")
    assert load(BrokerConfig, "broker", arguments={}) == BrokerConfig()
    assert zookeeper_servers(None) == "127.0.0.1:2181"


def test_a_file_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*metamq\.toml: No such file"):
        read_file(file)


def test_every_client_takes_root_from_the_environment(metamq_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAMQ_ROOT", "no/root")
    for client in (Admin, Producer, lambda address: Consumer(address, topics="t")):
        with pytest.raises(ConfigError, match=r"the root in ZooKeeper, 'no/root', does not start with '/'"):
            client(metamq_cluster.zookeeper)  # type: ignore[operator]
    for aio_client in (aio.Admin, aio.Producer):
        assert aio_client(metamq_cluster.zookeeper)._access.root == "no/root"
    assert aio.Consumer(metamq_cluster.zookeeper, topics="t")._access.root == "no/root"
