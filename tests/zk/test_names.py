"""Names and paths: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metamq.client.handling.dead_letters import dead_letter_topic
from metamq.errors import ConfigError
from metamq.zk.names import (
    MAX_GROUP_CHARS,
    check_consumer,
    check_group,
    check_name,
    check_topic,
    parse_partition,
    partition_name,
)
from metamq.zk.paths import Paths, master_offer, slave_offer
from metamq.zk.servers import parse_servers

GOOD = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,200}\Z")
numbers = st.integers(0, 999_999_999)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=20) | st.text("aZ9._-/\n ", max_size=220))
def test_a_name_is_accepted_exactly_when_the_rule_says_so(name: str) -> None:
    if GOOD.match(name):
        assert check_name("topic", name) == name
    else:
        with pytest.raises(ConfigError, match="Names have 1 to 200 characters"):
            check_name("topic", name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "topic is empty"),
        ("a b", "topic 'a b' has ' ' at character 2"),
        ("flüge", "topic 'flüge' has 'ü' at character 3"),
        ("a/b", "topic 'a/b' has '/' at character 2"),
        ("a\n", r"topic 'a\\n' has '\\n' at character 2"),
        (".", "topic '.' is a path"),
        ("..", "topic '..' is a path"),
        ("x" * 201, "has 201 characters"),
    ],
)
def test_an_error_names_the_thing_and_the_character(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_topic(name)


@pytest.mark.parametrize("pattern", ["*", "orders.*", "or*rs", "order?", "orders-[0-9]", "orders,payments", ">", "#"])
def test_wildcards_name_no_topic(pattern: str) -> None:
    """A topic is what it is called: no name stands for several, for a producer, a consumer or a broker's settings."""
    with pytest.raises(ConfigError, match=r"^topic '.*' has '.' at character \d+\. Names have 1 to 200 characters"):
        check_topic(pattern)


def test_each_kind_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^group 'a b'"):
        check_group("a b")
    with pytest.raises(ConfigError, match=r"^consumer id 'a b'"):
        check_consumer("a b")
    assert check_consumer("...") == "..."
    assert check_group("g...") == "g..."


@pytest.mark.parametrize(("check", "kind"), [(check_topic, "topic"), (check_group, "group")])
def test_what_becomes_a_folder_does_not_begin_with_a_dot(check: Callable[[str], str], kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind} '.hidden' begins with a dot"):
        check(".hidden")


def test_a_group_leaves_room_for_its_dead_letter_topic() -> None:
    longest = check_group("g" * MAX_GROUP_CHARS)
    assert check_topic(dead_letter_topic(longest)).startswith(longest)
    with pytest.raises(ConfigError, match="has 189 characters"):
        check_group(longest + "g")


@given(numbers, numbers)
def test_partition_names_go_there_and_back(broker_id: int, index: int) -> None:
    assert parse_partition(partition_name(broker_id, index)) == (broker_id, index)


@pytest.mark.parametrize("name", ["", "0", "0-", "-1", "0-1-2", "00-1", "0-01", "a-1", "0 - 1", "0-1\n", "٠-١"])
def test_what_is_no_partition_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a broker id, a '-' and an index"):
        parse_partition(name)


def test_partitions_sort_by_number() -> None:
    assert sorted(["10-0", "0-10", "0-9", "2-1"], key=parse_partition) == ["0-9", "0-10", "2-1", "10-0"]


def test_negative_numbers_name_no_partition() -> None:
    with pytest.raises(ConfigError):
        partition_name(-1, 0)


def test_every_path() -> None:
    paths = Paths()
    assert paths.broker_ids() == "/meta/brokers/ids"
    assert paths.broker(0) == "/meta/brokers/ids/0"
    assert paths.master(0) == "/meta/brokers/ids/0/master"
    assert paths.slave(0, 1) == "/meta/brokers/ids/0/slave1"
    assert paths.broker_state(0) == "/meta/brokers/ids/0/state"
    assert paths.offered_topic("topics-pub", "t", master_offer(0)) == "/meta/brokers/topics-pub/t/0-m"
    assert paths.offered_topic("topics-sub", "t", slave_offer(0, 2)) == "/meta/brokers/topics-sub/t/0-s2"
    assert paths.topic_config("t") == "/meta/config/topics/t"
    assert paths.member("g", "c") == "/meta/consumers/g/ids/c"
    assert paths.plan("g") == "/meta/consumers/g/plan"
    assert paths.owner("g", "t", "0-3") == "/meta/consumers/g/owners/t/0-3"
    assert paths.offset("g", "t", "0-3") == "/meta/consumers/g/offsets/t/0-3"
    assert Paths("/a/b").plan("g") == "/a/b/consumers/g/plan"


@pytest.mark.parametrize("root", ["", "/", "meta", "/meta/", "//meta", "/a b", "/..", "/a/./b"])
def test_a_root_is_an_absolute_path_of_names(root: str) -> None:
    with pytest.raises(ConfigError):
        Paths(root)


@pytest.mark.parametrize(
    ("servers", "hosts", "chroot"),
    [
        ("zk", [("zk", 2181)], ""),
        ("zk1:1,zk2:2", [("zk1", 1), ("zk2", 2)], ""),
        (" zk1:1 , zk2 /a/b/ ", [("zk1", 1), ("zk2", 2181)], "/a/b"),
        ("[::1]:2183/x", [("::1", 2183)], "/x"),
        ("zk/", [("zk", 2181)], ""),
    ],
)
def test_an_address_is_read(servers: str, hosts: list[tuple[str, int]], chroot: str) -> None:
    assert parse_servers(servers) == (hosts, chroot)


@pytest.mark.parametrize(
    "servers", ["", ",", "zk:0", "zk:65536", "zk:x", "zk:1,,zk2", "http://zk", "zk/a//b", "zk/a b"]
)
def test_a_wrong_address_is_refused(servers: str) -> None:
    with pytest.raises(ConfigError):
        parse_servers(servers)
