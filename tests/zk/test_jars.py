"""Where the jars of the server come from, and that nothing unchecked is ever used."""

from __future__ import annotations

import hashlib
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from metamq.errors import ConfigError, CorruptData
from metamq.zk.server import jars
from metamq.zk.server.jars import (
    DEFAULT_REPOSITORY,
    JARS,
    LOGGING_JAR,
    PINNED,
    TLS_JARS,
    Jar,
    cache_folder,
    fetched,
    find_jars,
)

CONTENT = bytes(range(256)) * 1_000
JAR = Jar("org/example", "thing", "1.0", len(CONTENT), hashlib.sha512(CONTENT).hexdigest())


class Repository:
    """A Maven repository on this machine, with what it serves by location."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        repository = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                repository.asked.append(self.path)
                content = repository.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/maven2"


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    made = Repository()
    monkeypatch.setenv("METAMQ_MAVEN", made.url + "/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def test_the_pins_are_whole() -> None:
    assert [jar.artifact for jar in JARS] == ["zookeeper", "zookeeper-jute", "slf4j-api", "metrics-core", "snappy-java"]
    assert all(len(bytes.fromhex(jar.sha512)) == 64 and jar.size > 0 for jar in PINNED)
    assert DEFAULT_REPOSITORY.startswith("https://")


def test_a_download_is_checked_and_kept(repository: Repository, tmp_path: Path) -> None:
    repository.files[f"/maven2/{JAR.location}"] = CONTENT
    progress: list[tuple[str, int, int]] = []
    path = fetched(JAR, tmp_path / "cache", lambda *step: progress.append(step))
    assert path == tmp_path / "cache" / "thing-1.0.jar"
    assert path.read_bytes() == CONTENT
    assert progress[-1] == ("thing-1.0.jar", len(CONTENT), len(CONTENT))
    assert [path.name for path in path.parent.iterdir()] == ["thing-1.0.jar"]
    fetched(JAR, tmp_path / "cache", None)
    assert repository.asked == ["/maven2/org/example/thing/1.0/thing-1.0.jar"]


@pytest.mark.parametrize("served", [CONTENT[:-1], CONTENT + b"x", b"y" + CONTENT[1:], b""])
def test_what_is_not_the_pinned_jar_is_thrown_away(repository: Repository, tmp_path: Path, served: bytes) -> None:
    repository.files[f"/maven2/{JAR.location}"] = served
    with pytest.raises(CorruptData, match=r"it is not the pinned thing-1\.0\.jar"):
        fetched(JAR, tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_cache_heals(repository: Repository, tmp_path: Path) -> None:
    repository.files[f"/maven2/{JAR.location}"] = CONTENT
    (tmp_path / JAR.file_name).write_bytes(CONTENT[:100])
    assert fetched(JAR, tmp_path, None).read_bytes() == CONTENT


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pyspark is installed, a test before may have imported it."""
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)


@pytest.mark.usefixtures("not_imported")
def test_without_any_source_the_error_names_all_of_them(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("METAMQ_ZOOKEEPER_JARS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "pyspark").exists()])
    assert cache_folder() == tmp_path / "metamq" / f"zookeeper-{jars.ZOOKEEPER_VERSION}"
    with pytest.raises(ConfigError, match=f"{repository.url}/org/apache/zookeeper/.* cannot be fetched") as failure:
        find_jars()
    for way in ("--fetch-jars", "METAMQ_ZOOKEEPER_JARS", "pyspark", "METAMQ_MAVEN", "HTTPS_PROXY", "METAMQ_ZOOKEEPER "):
        assert way in failure.value.hint


@pytest.mark.usefixtures("not_imported")
def test_the_jars_of_an_installed_pyspark_are_not_used_by_themselves(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of another version, and nobody has looked at them: only the pinned ones run."""
    folder = tmp_path / "site" / "pyspark" / "jars"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise AssertionError('imported')")
    for jar in JARS:
        (folder / f"{jar.artifact}-9.9.jar").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("METAMQ_ZOOKEEPER_JARS", raising=False)
    with pytest.raises(ConfigError, match="cannot be fetched"):
        find_jars()
    assert repository.asked == [f"/maven2/{JARS[0].location}"]
    monkeypatch.setenv("METAMQ_ZOOKEEPER_JARS", str(folder))
    assert find_jars() == [folder / f"{jar.artifact}-9.9.jar" for jar in JARS]


def test_the_setting_comes_first_and_must_be_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAMQ_ZOOKEEPER_JARS", str(tmp_path))
    for jar in JARS[:-1]:
        (tmp_path / jar.file_name).write_bytes(b"")
    with pytest.raises(ConfigError, match=f"METAMQ_ZOOKEEPER_JARS={tmp_path} has no jar of snappy-java"):
        find_jars()
    (tmp_path / JARS[-1].file_name).write_bytes(b"")
    (tmp_path / LOGGING_JAR.file_name).write_bytes(b"")
    assert find_jars() == [tmp_path / jar.file_name for jar in (*JARS, LOGGING_JAR)]
    with pytest.raises(ConfigError, match="has no jar of netty-handler, netty-transport"):
        find_jars(secure=True)
    for jar in TLS_JARS:
        (tmp_path / jar.file_name).write_bytes(b"")
    assert find_jars(secure=True) == [tmp_path / jar.file_name for jar in PINNED]
