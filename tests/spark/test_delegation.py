"""Spark's own processes read and write by tokens: of queries whose driver logs in by password."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq.security.delegation import Delegations
from metamq.security.rights import READ, WRITE
from metamq.spark_consumers import spark_session
from metamq.testing import Cluster, cluster
from metamq.zk.security.delegations import DELEGATIONS
from metamq.zk.session.session import Session
from tests.parts import wait_until
from tests.security.certificate_folder import secured
from tests.security.nodes import run

PASSWORD = "canary in a coal mine"
TOPIC = "flights"
ROWS = 500

PROGRAM = """
import sys, time
from pathlib import Path
from metamq.spark_consumers import session

topic, place, kind = sys.argv[1:]
conf = {
    "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.eventLog.enabled": "true",
    "spark.eventLog.dir": place, "spark.sql.warehouse.dir": place, "spark.local.dir": place,
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
spark = session("tokens", "local[2]", conf)
if kind == "batch":
    frame = spark.read.format("metamq").option("subscribe", topic).load()
    frame.select("value").write.format("metamq").mode("append").option("topic", topic).save()
    print("rows", spark.read.format("metamq").option("subscribe", topic).load().count(), flush=True)
    stream = spark.readStream.format("metamq").options(subscribe=topic, startingOffsets="earliest")
    stream = stream.option("maxOffsetsPerTrigger", 40)
    writer = stream.load().select("value").writeStream.format("metamq").option("topic", topic + "-out")
    query = writer.option("checkpointLocation", place + "/many").trigger(availableNow=True).start()
    query.awaitTermination()
    print("batches", len(list(Path(place, "many", "commits").glob("[0-9]*"))), flush=True)
    print("written", spark.read.format("metamq").option("subscribe", topic + "-out").load().count(), flush=True)
else:
    frame = spark.readStream.format("metamq").options(subscribe=topic, startingOffsets="earliest").load()
    query = frame.writeStream.format("memory").queryName("kept").option("checkpointLocation", place + "/kept").start()
    query.processAllAvailable()
    print("rows", spark.table("kept").count(), flush=True)
    sys.stdin.readline()
    query.stop()
    print("stopped", flush=True)
    sys.stdin.readline()
spark.stop()
"""


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[Cluster]:
    with cluster(security=secured(certificates)) as running, running.admin() as admin:
        admin.set_user("etl", PASSWORD)
        yield running


@pytest.fixture
def topic(secure: Cluster, request: pytest.FixtureRequest) -> str:
    name = f"flights-{abs(hash(request.node.name))}"
    secure.create_topic(name, partitions=2)
    with secure.admin() as admin, secure.producer() as producer:
        for right in (READ, WRITE):
            admin.add_rules("allow", "etl", right, f"topic:{name}")
        producer.send_many(name, [b"%d" % number for number in range(ROWS)])
    return name


def program(secure: Cluster, certificates: Path, place: Path, topic: str, kind: str) -> subprocess.Popen[str]:
    password = place / "password"
    password.write_text(PASSWORD)
    (place / "spark").mkdir()
    environment = {
        **os.environ,
        "METAMQ_ZOOKEEPER": secure.zookeeper,
        "METAMQ_SECURITY_CA": str(certificates / "ca.crt"),
        "METAMQ_SECURITY_USER": "etl",
        "METAMQ_SECURITY_PASSWORD_FILE": str(password),
        "XDG_CACHE_HOME": str(place / "cache"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, topic, str(place / "spark"), kind],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def tokens(secure: Cluster) -> Delegations:
    found: list[Delegations] = []

    async def read(session: Session) -> None:
        found.append(await DELEGATIONS.read(session))

    run(secure, secure.security, read)
    return found[0]


def has_canary(place: Path) -> list[Path]:
    """Files of Spark with the password, as its log of events."""
    files = [path for path in (place / "spark").rglob("*") if path.is_file()]
    assert files
    return [path for path in files if PASSWORD.encode() in path.read_bytes()]


def test_batches_and_a_stream_of_many_batches_have_one_token_each(
    secure: Cluster, certificates: Path, tmp_path: Path, topic: str
) -> None:
    out = f"{topic}-out"
    secure.create_topic(out, partitions=2)
    with secure.admin() as admin:
        for right in (READ, WRITE):
            admin.add_rules("allow", "etl", right, f"topic:{out}")
    with program(secure, certificates, tmp_path, topic, "batch") as driver:
        output, errors = driver.communicate(timeout=250)
    assert f"rows {2 * ROWS}" in output, errors[-2000:]
    assert f"written {2 * ROWS}" in output, errors[-2000:]
    (batches,) = [int(line.split()[1]) for line in output.splitlines() if line.startswith("batches")]
    assert batches >= 20
    assert PASSWORD not in output + errors
    assert not has_canary(tmp_path)
    found = list(tokens(secure).values())
    assert {token.principal for token in found} == {"etl"}
    for right in ((READ, topic), (WRITE, topic), (READ, out), (WRITE, out)):
        own = [token for token in found if token.rights == {right}]
        assert 1 <= len(own) <= 1 + (right == (READ, topic)), "the stream has read by its own"


def test_a_stream_has_a_token_until_it_ends(secure: Cluster, certificates: Path, tmp_path: Path, topic: str) -> None:
    def is_known() -> bool:
        return any(token.rights == {(READ, topic)} for token in tokens(secure).values())

    with program(secure, certificates, tmp_path, topic, "stream") as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        said = iter(driver.stdout)
        assert any(f"rows {ROWS}" in line for line in said)
        assert is_known()
        driver.stdin.write("stop\n")
        driver.stdin.flush()
        assert any("stopped" in line for line in said)
        wait_until(lambda: not is_known(), what="the token's end")
        driver.communicate("end\n", timeout=100)
    assert not has_canary(tmp_path)


@pytest.mark.parametrize(
    ("conf", "is_private"),
    [
        ({"spark.master": "local[2]"}, True),
        ({"spark.master": "spark://host:7077"}, False),
        ({"spark.master": "yarn", "spark.network.crypto.enabled": "true"}, True),
        ({"spark.master": "yarn", "spark.ssl.rpc.enabled": "true"}, True),
        ({"spark.master": "yarn", "spark.network.crypto.enabled": "false"}, False),
    ],
)
def test_what_others_can_read(conf: dict[str, str], is_private: bool) -> None:
    assert spark_session.is_private(conf) == is_private
