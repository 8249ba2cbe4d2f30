"""`metamq console`: serves the console."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from metamq.broker.process.parent import follow_parent
from metamq.cli.command import CliCommand
from metamq.cli.context import current, look_for_cluster
from metamq.cli.show.output import TEXT_OR_JSON, print_json_line, say
from metamq.cli.up_console import PORT, free_port
from metamq.errors import ConfigError
from metamq.security.exposure import is_exposed

if TYPE_CHECKING:
    from uvicorn import Server

    from metamq.client.settings import ClusterAccess
    from metamq.console.console_view import Doctor

HOST = "127.0.0.1"
FILE = click.Path(exists=True, dir_okay=False)


@click.command(cls=CliCommand)
@click.option("--host", default=HOST, show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help=f"Port to listen on; 0 takes any free one.  [default: the first free one from {PORT} on]",
)
@click.option("--name", "names", multiple=True, help="Name in the address of the pages, as console.example.org.")
@click.option("--login", is_flag=True, help="Ask each visitor for the name and password of a user of the cluster.")
@click.option("--certificate", type=FILE, help="Use TLS, with the server's certificate in this file (PEM).")
@click.option("--key", type=FILE, help="File with the private key of --certificate (PEM).")
@click.option("--plain-http", is_flag=True, help="Take logins without TLS: a proxy adds it.")
@click.option("--allow-changes", is_flag=True, help="Let visitors send dead letters again.")
@click.option("--with-parent", is_flag=True, hidden=True)
@TEXT_OR_JSON
def console(port: int | None, with_parent: bool, allow_changes: bool, output: str, **options: Any) -> int:
    """Show brokers, topics, groups and the doctor's findings in a browser. SIGTERM or Ctrl-C stops it.

    It listens on this machine only, and uses the login of your settings: every user of this machine can see what you
    can see. With --login the pages show what the visitor may see. If the cluster has security, another --host turns
    --login on. Needs `pip install 'metamq[console]'`.

    \b
    metamq console
    metamq console --port 0 -o json
    metamq console --host 0.0.0.0 --certificate c.pem --key k.pem
    """  # fmt: skip
    try:
        from metamq.console.app import HOSTS, ConsoleRules, make_server
        from metamq.console.visitors import Visitors
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the console needs the package {error.name}", hint="Install it: pip install 'metamq[console]'."
        ) from error
    from metamq.cli.commands.doctor import look

    if with_parent:
        follow_parent(sys.stdin.fileno())
    settings, place = current(), Place(**options)
    access = settings.access()
    with_login = place.with_login(access.security.is_on)
    asyncio.run(look_for_cluster(access))

    def doctor_of(access: ClusterAccess) -> Doctor:
        return partial(look, settings, access=access)

    visitors = Visitors(access, settings.config_file, doctor_of, with_login=with_login)
    rules = ConsoleRules([*HOSTS, *place.names, place.host], allow_changes)
    with _listen(place.host, free_port(place.host) if port is None else port) as listener:
        number = listener.getsockname()[1]
        url = place.url(number)
        if not with_login and is_exposed(place.host):
            say(f"Security is off: every client that reaches {place.host}:{number} sees the pages.", fg="yellow")
        if output == "json":
            print_json_line({"console": url})
        else:
            say(f"The console is at {url} . Ctrl-C stops it.")
        asyncio.run(_serve(make_server(visitors, rules, place.certificate, place.key), listener))
    return 0


@dataclass(frozen=True, slots=True)
class Place:
    """The address of the console, and its protection: the options of the command."""

    host: str
    names: Sequence[str]
    login: bool
    certificate: str | None
    key: str | None
    plain_http: bool

    def with_login(self, is_secure: bool) -> bool:
        """Returns True if visitors log in. Raises ConfigError if the options do not fit together."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--certificate and --key belong together", hint="Give both, or none.")
        if self.login and not is_secure:
            hint = "Users are a part of it: see `metamq security init` and docs/security.md."
            raise ConfigError("--login needs a cluster with security", hint=hint)
        is_open = is_exposed(self.host)
        if is_open and is_secure and not (self.certificate or self.plain_http):
            raise ConfigError(
                f"at {self.host} the console would take passwords without TLS",
                hint="Give --certificate and --key, or --plain-http behind a proxy that adds TLS.",
            )
        return self.login or (is_open and is_secure)

    def url(self, port: int) -> str:
        """Returns the address for a browser."""
        host = self.names[0] if self.names else f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.certificate else ''}://{host}:{port}/"


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"the console cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}",
            hint="Choose another port with --port, where 0 takes a free one, or another --host.",
        ) from error


async def _serve(server: Server, listener: socket.socket) -> None:
    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    await server.serve([listener])
