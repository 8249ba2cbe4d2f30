"""The line that matters in what a ZooKeeper server left in its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from metamq.zk.server.server_log import what_went_wrong

NOISE = """\
[main] WARN org.apache.zookeeper.server.ServerCnxnFactory - maxCnxns is not configured, using default value 0.
[NIOWorkerThread-1] ERROR org.apache.zookeeper.server.ServerCnxn - Error closing a command socket
java.lang.NullPointerException: Cannot invoke "removeCnxn()" because "this.zkDb" is null
\tat org.apache.zookeeper.server.ZooKeeperServer.removeCnxn(ZooKeeperServer.java:333)
"""
BROKEN = """\
[main] WARN org.apache.zookeeper.server.persistence.FileTxnLog - Unexpected exception
java.io.IOException: Transaction log: log.1 has invalid magic number -665857302 != 1514884167
\tat org.apache.zookeeper.server.persistence.FileTxnLog.read(FileTxnLog.java:473)
[main] ERROR org.apache.zookeeper.server.ZooKeeperServerMain - Unexpected exception, exiting abnormally
java.io.IOException: No snapshot found, but there are log entries. Something is broken!
\tat org.apache.zookeeper.server.persistence.FileTxnSnapLog.restore(FileTxnSnapLog.java:290)
[main] ERROR org.apache.zookeeper.util.ServiceUtils - Exiting JVM with code 1
"""
CAUSED = """\
[main] ERROR org.apache.zookeeper.server.quorum.QuorumPeerMain - Invalid config, exiting abnormally
org.apache.zookeeper.server.quorum.QuorumPeerConfig$ConfigException: Error processing zoo.cfg
\tat org.apache.zookeeper.server.quorum.QuorumPeerMain.main(QuorumPeerMain.java:91)
Caused by: java.lang.IllegalArgumentException: dataDir is not set
\tat org.apache.zookeeper.server.quorum.QuorumPeerConfig.parse(QuorumPeerConfig.java:189)
\t... 2 more
Invalid config, exiting abnormally
"""
NO_OPTION = """\
Unrecognized VM option 'NoSuchThing'
Error: Could not create the Java Virtual Machine.
Error: A fatal exception has occurred. Program will exit.
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            NOISE + BROKEN,
            "Unexpected exception, exiting abnormally: "
            "IOException: No snapshot found, but there are log entries. Something is broken!",
        ),
        (CAUSED, "Invalid config, exiting abnormally: IllegalArgumentException: dataDir is not set"),
        (NO_OPTION, "Unrecognized VM option 'NoSuchThing'"),
        ("SLF4J(W): No SLF4J providers were found.\n" + NO_OPTION, "Unrecognized VM option 'NoSuchThing'"),
        (NOISE, ""),
        ("", ""),
    ],
    ids=["data", "configuration", "Java", "mute", "noise", "nothing"],
)
def test_the_line_that_matters(tmp_path: Path, log: str, said: str) -> None:
    path = tmp_path / "zookeeper.log"
    path.write_text("an error of an earlier run\n" + log)
    assert what_went_wrong(path, len("an error of an earlier run\n")) == said


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    assert what_went_wrong(tmp_path / "zookeeper.log", 0) == ""
