"""The options of every command: ZooKeeper's address, the settings file, the amount of logging."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from metamq.cli.contexts import Choice, choose
from metamq.cli.show.terminal import escaped
from metamq.client.settings import CONFIG_FILE_VARIABLE, ClusterAccess, cluster_access, read_file
from metamq.zk.paths import DEFAULT_ROOT

if TYPE_CHECKING:
    from metamq import Admin


class _EscapingFormatter(logging.Formatter):
    """Escapes control characters in log lines: other people's bytes must not control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass
class Globals:
    """The options that every command takes."""

    zookeeper: str | None = None
    context: str | None = None
    config: str | None = None
    root: str | None = None
    verbose: int = 0
    debug: bool = False
    checking: bool = False
    """True while a command checks its options: their errors end it with the status of wrong options."""
    logs_json: bool = False
    """True if each line on standard error is a JSON object, also that of an error which ends the command."""

    def choice(self, *, implicit: bool = True) -> Choice:
        """Returns the context that applies, see metamq.cli.contexts. Raises ConfigError."""
        return choose(self.zookeeper, self.context, self.config, implicit=implicit)

    def access(self, *, implicit: bool = True) -> ClusterAccess:
        """Returns the way to the cluster. Without `implicit` only --context chooses a context. Raises ConfigError."""
        choice = self.choice(implicit=implicit)
        if choice.name is None:
            return cluster_access(self.zookeeper, self.root, self.config, None)
        file = self._file(choice)
        zookeeper = choice.cluster.zookeeper or read_file(choice.cluster.config).get("zookeeper")
        root = self.root or choice.cluster.root or read_file(file).get("root") or DEFAULT_ROOT
        return cluster_access(zookeeper, root, file, None)

    @property
    def config_file(self) -> str | None:
        """The settings file; None if there is none. Raises ConfigError."""
        return self.settings_file()

    def settings_file(self, *, implicit: bool = True) -> str | None:
        """Returns the settings file, see access(). Raises ConfigError."""
        return self._file(self.choice(implicit=implicit))

    def _file(self, choice: Choice) -> str | None:
        if choice.name is None:
            return self.config or os.environ.get(CONFIG_FILE_VARIABLE) or None
        # A context without a file has none: METAMQ_CONFIG may have the certificates of another cluster.
        return self.config or choice.cluster.config or os.devnull

    def client(self) -> dict[str, Any]:
        """Returns the arguments of a Producer, Consumer or Admin. Raises the errors of look_for_cluster()."""
        import asyncio  # here, as all slow imports: `metamq --help` needs none

        access = self.access()
        asyncio.run(look_for_cluster(access))
        return {**access._asdict(), "config": self.config_file}

    def admin(self) -> Admin:
        """Returns an open Admin. Raises ConfigError, ConnectError."""
        from metamq import Admin

        return Admin(**self.client())

    def log(self, quiet: int, source: str = "") -> None:
        """Sends log lines from level `quiet` up to standard error; -v, -vv and --debug log more.

        `source` is in each line, for a process that shares standard error with others.
        """
        form = LOG_FORMAT.replace("%(name)s", f"{source} %(name)s") if source else LOG_FORMAT
        level = logging.DEBUG if self.debug or self.verbose > 1 else logging.INFO if self.verbose else quiet
        logging.basicConfig(level=max(level, logging.WARNING), format=form)
        if sys.stderr.isatty():
            for handler in logging.getLogger().handlers:
                handler.setFormatter(_EscapingFormatter(form))
        logging.getLogger("metamq").setLevel(level)
        # metamq.zk logs lost connections in plainer words.
        logging.getLogger("kazoo").setLevel(logging.DEBUG if self.debug else logging.CRITICAL)


def current() -> Globals:
    """Returns the options of the running command."""
    found = click.get_current_context().find_object(Globals)
    assert found is not None
    return found


async def look_for_cluster(access: ClusterAccess) -> None:
    """Checks that a cluster exists, before a command works on it: a wrong address or root must not look empty.

    Raises ConnectError if ZooKeeper does not answer, ConfigError if no broker was ever started at the root.
    """
    from metamq.client.net.first_contact import open_session
    from metamq.zk.session.presence import missing_cluster

    async with await open_session(access, patient=False) as session:
        problem = await missing_cluster(session)
        if problem is not None:
            raise problem
