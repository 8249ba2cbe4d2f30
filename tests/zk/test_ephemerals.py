"""The table of a shared session's ephemeral nodes, beside a model of the server, with answers that are lost."""

from __future__ import annotations

import contextlib
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from metamq.zk.errors import BadVersion, ConnectionLost, NodeExists
from metamq.zk.nodes import ANY_VERSION, Create, Delete, Op, SetData
from metamq.zk.session.ephemerals import Ephemerals

PATHS = ("/a", "/b")
CLIENTS = ("one", "two")
steps = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["create", "set", "delete", "again"]),
            st.sampled_from(CLIENTS),
            st.sampled_from(PATHS),
            st.integers(0, 1),
        ),
        st.tuples(st.sampled_from(["answer", "refuse", "break", "expire"]), st.integers(0, 5)),
    ),
    max_size=40,
)


class Server:
    """The ephemeral nodes of one session: their last makers and their contents."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[str, bytes]] = {}

    def carry_out(self, client: str, operations: list[Op]) -> bool:
        """All or nothing."""
        nodes = dict(self.nodes)
        for one in operations:
            if isinstance(one, Create):
                if one.path in nodes:
                    return False
                nodes[one.path] = client, one.data
            elif one.path not in nodes:
                return False
            elif isinstance(one, SetData):
                nodes[one.path] = nodes[one.path][0], one.data
            else:
                del nodes[one.path]
        self.nodes = nodes
        return True


class Line:
    """The requests in flight. ZooKeeper carries them out, and answers, in their order."""

    def __init__(self) -> None:
        self.table, self.server = Ephemerals(), Server()
        self.requests: deque[tuple[str, list[Op], AbstractContextManager[None]]] = deque()

    def begin(self, client: str, operations: list[Op]) -> None:
        block = self.table.writing(client, operations)
        block.__enter__()
        self.requests.append((client, operations, block))

    def may_change(self, client: str, path: str) -> bool:
        """True for the maker of a node until it deletes it."""
        last = [one for _, operations, _ in self.requests for one in operations if one.path == path]
        is_going = any(isinstance(one, Delete) for one in last)
        return self.server.nodes.get(path, ("", b""))[0] == client and not is_going

    def answer(self) -> None:
        client, operations, block = self.requests.popleft()
        is_done = self.server.carry_out(client, operations)
        leave(block, None if is_done else BadVersion("/a"))

    def refuse(self) -> None:
        leave(self.requests.pop()[2], ConnectionLost("zk", "nothing was sent", outcome="not_done"))

    def end(self, done: int) -> None:
        """The connection breaks, after some of the requests were carried out."""
        for number, (client, operations, block) in enumerate(self.requests):
            if number < done:
                self.server.carry_out(client, operations)
            leave(block, ConnectionLost("zk", "lost"))
        self.requests.clear()


def leave(block: AbstractContextManager[None], error: Exception | None) -> None:
    block.__exit__(type(error) if error else None, error, None)


def requested(action: str, client: str, path: str, number: int) -> list[Op]:
    content = f"{client} {number}".encode()
    create, delete = Create(path, content, ephemeral=True), Delete(path, ANY_VERSION)
    operations: dict[str, list[Op]] = {
        "create": [create],
        "set": [SetData(path, content, ANY_VERSION)],
        "delete": [delete],
        "again": [delete, create],
    }
    return operations[action]


CREATED = [("create", "one", "/a", 0), ("answer", 0)]
HANDED_OVER = [*CREATED, ("delete", "one", "/a", 0), ("create", "two", "/a", 0), ("answer", 0), ("break", 1)]


@given(steps)
@example(HANDED_OVER)
def test_the_maker_of_a_node_is_known_whatever_answers_are_lost(steps: list[tuple[Any, ...]]) -> None:
    line = Line()
    for action, *rest in steps:
        if action == "answer" and line.requests:
            line.answer()
        elif action == "refuse" and line.requests:
            line.refuse()
        elif action == "break":
            line.end(*rest)
        elif action == "expire":
            line.table.clear()
            line.server.nodes.clear()
            line.end(0)
        elif action == "create" or (rest[1:] and line.may_change(*rest[:2])):
            line.begin(rest[0], requested(action, *rest))
        for there, (maker, data) in line.server.nodes.items():
            assert [one for one in CLIENTS if line.table.made_by(one, there, data)] == [maker]
            assert there in line.table.of(maker)


def test_an_answer_says_nothing_of_a_later_write_in_flight() -> None:
    table = Ephemerals()
    with table.writing("one", [Create("/a", b"0", ephemeral=True)]):
        pass
    own, common = table.writing("one", [SetData("/a", b"1", 0)]), table.writing("all", [SetData("/a", b"2", 1)])
    own.__enter__()
    common.__enter__()
    leave(own, None)
    leave(common, ConnectionLost("zk", "lost"))
    assert [table.made_by("one", "/a", content) for content in (b"1", b"2")] == [True, True]


def test_a_refused_creation_says_nothing_of_the_same_content_of_another_client() -> None:
    table = Ephemerals()
    late = table.writing("two", [Create("/a", b"id", ephemeral=True)])
    late.__enter__()
    with table.writing("one", [Create("/a", b"id", ephemeral=True)]):
        pass
    leave(late, NodeExists("/a"))
    assert [table.made_by(client, "/a", b"id") for client in CLIENTS] == [True, False]


def test_what_was_never_sent_leaves_no_trace() -> None:
    table = Ephemerals()
    with contextlib.suppress(ConnectionLost), table.writing("one", [Create("/a", b"x", ephemeral=True)]):
        raise ConnectionLost("zk", "nothing was sent", outcome="not_done")
    assert (len(table), table.of("one")) == (0, [])


def test_an_answer_for_a_session_that_is_over_does_not_count() -> None:
    table = Ephemerals()
    with table.writing("one", [Create("/a", b"x", ephemeral=True)]):
        table.clear()
    assert (len(table), table.of("one")) == (0, [])


def test_the_last_node_is_deleted_first_and_persistent_nodes_are_not_noted() -> None:
    table = Ephemerals()
    for operation in (Create("/member", b"", ephemeral=True), Create("/folder", b""), Create("/owner", b"", True)):
        with table.writing("one", [operation]):
            pass
    assert table.of("one") == ["/owner", "/member"]
    table.forget("one", "/owner")
    assert (table.of("one"), len(table)) == (["/member"], 1)
