"""The table of a shared session's ephemeral nodes, beside a model of the server, with answers that are lost."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from metamq.zk.errors import BadVersion, ConnectionLost
from metamq.zk.nodes import ANY_VERSION, Create, Delete, Op, SetData
from metamq.zk.session.ephemerals import Ephemerals

PATHS = ("/a", "/b")
CLIENTS = ("one", "two")
steps = st.lists(
    st.tuples(
        st.sampled_from(CLIENTS),
        st.sampled_from(["create", "set", "delete", "again", "expire"]),
        st.sampled_from(PATHS),
        st.booleans(),  # its answer is lost
        st.booleans(),  # a request without an answer is carried out
        st.integers(0, 1),
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


@given(steps)
def test_the_maker_of_a_node_is_known_whatever_answers_are_lost(
    steps: list[tuple[str, str, str, bool, bool, int]],
) -> None:
    table, server = Ephemerals(), Server()
    for client, action, path, is_lost, is_done, number in steps:
        content = f"{client} {number}".encode()
        operations: list[Op]
        if action == "expire":
            table.clear()
            server.nodes.clear()
            continue
        if action == "create":
            operations = [Create(path, content, ephemeral=True)]
        elif server.nodes.get(path, ("", b""))[0] != client:
            continue  # clients change only the nodes that they made
        elif action == "set":
            operations = [SetData(path, content, ANY_VERSION)]
        elif action == "delete":
            operations = [Delete(path, ANY_VERSION)]
        else:
            operations = [Delete(path, ANY_VERSION), Create(path, content, ephemeral=True)]
        with contextlib.suppress(ConnectionLost, BadVersion), table.writing(client, operations):
            succeeded = (is_done or not is_lost) and server.carry_out(client, operations)
            if is_lost:
                raise ConnectionLost("zk", "lost")
            if not succeeded:
                raise BadVersion(path)
        for there, (maker, data) in server.nodes.items():
            assert [one for one in CLIENTS if table.made_by(one, there, data)] == [maker]
            assert there in table.of(maker)


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
