"""`metamq console`: serves the console on this machine."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from metamq.broker.process.parent import follow_parent
from metamq.cli.command import CliCommand
from metamq.cli.context import current, look_for_cluster
from metamq.cli.show.output import TEXT_OR_JSON, print_json_line, say
from metamq.errors import ConfigError

if TYPE_CHECKING:
    from uvicorn import Server

HOST = "127.0.0.1"
PORT = 8180


@click.command(cls=CliCommand)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Port to listen on, at 127.0.0.1; 0 takes a free one.",
)
@click.option("--with-parent", is_flag=True, hidden=True)
@TEXT_OR_JSON
def console(port: int, with_parent: bool, output: str) -> int:
    """Show brokers, topics, groups and the doctor's findings in a browser. SIGTERM or Ctrl-C stops it.

    It changes nothing, and listens on this machine only. It uses the login of your settings: every user of this machine
    can read what you can read. Needs `pip install 'metamq[console]'`.

    \b
    metamq console
    metamq console --port 0 -o json
    """  # fmt: skip
    try:
        from metamq.console.app import make_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the console needs the package {error.name}", hint="Install it: pip install 'metamq[console]'."
        ) from error
    from metamq.cli.commands.doctor import look

    if with_parent:
        follow_parent(sys.stdin.fileno())
    settings = current()
    asyncio.run(look_for_cluster(settings.access()))
    with _listen(port) as listener:
        url = f"http://{HOST}:{listener.getsockname()[1]}/"
        if output == "json":
            print_json_line({"console": url})
        else:
            say(f"The console is at {url} . Ctrl-C stops it.")
        asyncio.run(_serve(make_server(settings, partial(look, settings)), listener))
    return 0


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise ConfigError(
            f"the console cannot listen on {HOST}:{port}: {(error.strerror or str(error)).lower()}",
            hint="Choose another port with --port; 0 takes a free one.",
        ) from error


async def _serve(server: Server, listener: socket.socket) -> None:
    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    await server.serve([listener])
