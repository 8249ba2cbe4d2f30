"""What all commands share: where ZooKeeper is, which file has the settings, how much is said."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from metamq.cli.show.terminal import inert
from metamq.client.settings import CONFIG_FILE_VARIABLE, load, zookeeper_root, zookeeper_servers

if TYPE_CHECKING:
    from metamq import Admin


class _Inert(logging.Formatter):
    """Other people's words in a line do not command the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return inert(super().format(record))


LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


Kind = Literal["producer", "consumer"]


def _options(kind: Kind) -> type[Any]:
    from metamq.client.fetch.consumer_options import ConsumerOptions
    from metamq.client.producer.producer_core import ProducerOptions

    return ProducerOptions if kind == "producer" else ConsumerOptions


@dataclass
class Globals:
    """The options that every command takes."""

    zookeeper: str | None = None
    config: str | None = None
    root: str | None = None
    verbose: int = 0
    debug: bool = False

    def servers(self) -> str:
        """ZooKeeper's address. Raises ConfigError."""
        return zookeeper_servers(self.zookeeper, self.config)

    def place(self) -> str:
        """The znode that all is kept below. Raises ConfigError."""
        return zookeeper_root(self.root, self.config)

    @property
    def config_file(self) -> str | None:
        """The file with the settings, where there is one."""
        return self.config or os.environ.get(CONFIG_FILE_VARIABLE)

    def client(self, *kinds: Kind, **settings: Any) -> dict[str, Any]:
        """The arguments of a Producer, Consumer or Admin. Raises ConfigError, ConnectError when no cluster is there.

        What is wrong with the settings of those `kinds`, of which some are given here, is told before anybody is asked.
        """
        from metamq.cli.reach import check_cluster

        for kind in kinds:
            load(_options(kind), kind, file=self.config, arguments=settings if kind == kinds[0] else {})
        servers, root = self.servers(), self.place()
        check_cluster(servers, root)
        return {"zookeeper": servers, "config": self.config, "root": root}

    def admin(self) -> Admin:
        """An open Admin. Raises ConfigError, ConnectError."""
        from metamq import Admin

        return Admin(**self.client())

    def log(self, quiet: int = logging.WARNING) -> None:
        """Sends log lines to standard error: of `quiet` and above, or more when asked for."""
        level = logging.DEBUG if self.debug or self.verbose > 1 else logging.INFO if self.verbose else quiet
        logging.basicConfig(level=max(level, logging.WARNING), format=LOG_FORMAT)
        if sys.stderr.isatty():
            for handler in logging.getLogger().handlers:
                handler.setFormatter(_Inert(LOG_FORMAT))
        logging.getLogger("metamq").setLevel(level)
        # What it says about lost connections, metamq.zk says in plainer words.
        logging.getLogger("kazoo").setLevel(logging.DEBUG if self.debug else logging.CRITICAL)


def current() -> Globals:
    """The options of the command that runs."""
    found = click.get_current_context().find_object(Globals)
    assert found is not None
    return found
