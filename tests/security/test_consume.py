"""Commands about the messages of a topic that the user may not read."""

from __future__ import annotations

import os
import subprocess

import pytest

from metamq.security.certificates import Authority
from metamq.testing import Cluster
from tests.cli.conftest import COMMAND, unset
from tests.parts import SLOW_S


@pytest.mark.parametrize(
    "command",
    [
        *(f"consume TOPIC {options}" for options in ("", "-e", "--from -1", "--partition 0-0", "--until 5")),
        "group reset TOPIC TOPIC --to -1 --dry-run",
    ],
)
def test_without_the_right_to_read_the_sentence_names_the_right(
    command: str, secure: Cluster, authority: Authority, name: str
) -> None:
    secure.create_topic(name, partitions=1)
    with secure.consumer(topics=name, group=name, idle_timeout_s=0):
        pass  # makes the group
    variables = {"METAMQ_SECURITY_DIR": str(authority.folder), "METAMQ_SECURITY_ROLE": name}
    arguments = [*COMMAND, "--zookeeper", secure.zookeeper, *command.replace("TOPIC", name).split()]
    environment = {**unset(os.environ), **variables, "METAMQ_SECURITY_ZOOKEEPER_TLS": "0"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=SLOW_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"metamq: '{name}' may not read topic:{name}\n" in done.stderr
    assert f"`metamq acl explain {name} read topic:{name}` shows the rule that decides." in done.stderr
