"""What the end of a run says: figures that tests report, and which tests are a run of their own; no module of tests
leaves anything behind."""

from __future__ import annotations

import gc
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from metamq.zk.server.embedded import EmbeddedZooKeeper
from tests import kinds, leftovers, one_zookeeper, zygote
from tests.examples import examples
from tests.mariadb import MariaDb, running_mariadb
from tests.parts import make_chroot
from tests.postgres import running_postgres
from tests.security.certificate_folder import make_folder

settings.register_profile("untimed", deadline=None, max_examples=examples(100))  # how fast it is, the bench says
settings.load_profile("untimed")

FIGURES = "figures"
LEFT_OUT = {
    "not slow": "The tests that take seconds are a separate run: ./dev test --slow",
    "not containers": "The container tests need a Docker engine, and are a run of their own: ./dev test --containers",
}
"""The line for each part of the -m that ./dev gives."""


def pytest_configure(config: pytest.Config) -> None:
    """A plugin of its own: a conftest is not asked about what belongs to the session."""
    config.pluginmanager.register(leftovers, "leftovers")
    config.pluginmanager.register(kinds, "kinds")
    # `./dev test &` in a script ignores SIGINT, `nohup ./dev test` SIGHUP; the processes of tests would inherit that.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    zygote.install()


def pytest_unconfigure() -> None:
    """After the last fixture."""
    one_zookeeper.close()
    zygote.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of tests are millions of objects, which stay. The collector, which is asked after each module, passes
    them over from here on."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[EmbeddedZooKeeper]:
    """A server shared by all tests; not to be stopped by any of them."""
    with EmbeddedZooKeeper() as server:
        yield server


@pytest.fixture
def servers(zookeeper: EmbeddedZooKeeper) -> str:
    """The shared server's address with a chroot that only this test has."""
    return make_chroot(f"{zookeeper.address}/{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The connection string of a PostgreSQL server of our own, on a Unix socket. A test takes a schema of its own."""
    with running_postgres() as server:
        yield server.dsn


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDb]:
    """A MariaDB server of our own, on a Unix socket. A test takes a database of its own."""
    with running_mariadb() as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `metamq security init` makes it."""
    return make_folder(tmp_path_factory.mktemp("certificates") / "security").folder


@pytest.fixture
def report_figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Shows a line at the end of the run, also of a test that passes: what is printed, pytest keeps to itself then."""

    def report(line: str) -> None:
        request.node.user_properties.append((FIGURES, line))  # pytest-xdist's workers send these along

    return report


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In a run of Spark's tests, files that do not speak of Spark are not imported: that would take ten seconds."""
    is_passed_over = (
        config.option.markexpr.startswith("spark")
        and collection_path.name.startswith("test_")
        and collection_path.is_file()
        and "spark" not in f"{collection_path.parent.name}\n{collection_path.read_text()}"
    )
    return True if is_passed_over else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """After the outcome of the tests."""
    reported = list(_reported(terminalreporter))
    if reported:
        terminalreporter.section("figures")
    for line in reported:
        terminalreporter.write_line(line)
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        for part, line in LEFT_OUT.items():
            if part in config.option.markexpr:
                terminalreporter.write_line(line)


def _reported(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    """Each test's lines, below its name."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                lines = [str(line) for kind, line in report.user_properties if kind == FIGURES]
                if lines:
                    yield report.nodeid
                    yield from (f"  {line}" for line in lines)
