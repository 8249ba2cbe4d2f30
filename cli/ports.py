"""Ports for servers that `metamq up` starts."""

from __future__ import annotations

from metamq.errors import ConfigError
from metamq.zk.server.ports import is_free

TRIED = 100


class Ports:
    """Free ports of one address. Each is given out once: a server that is starting does not listen yet."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._given: set[int] = set()

    def take(self, what: str, wanted: int | None, usual: int, option: str) -> int:
        """Returns the wanted port, else the usual one or the next free one. Raises ConfigError if none is free.

        A wanted port of 0 lets the system choose. `what` names the server for the error.
        """
        if wanted is not None:
            if wanted and not self._is_free(wanted):
                raise ConfigError(
                    f"port {wanted} of {self._host} is in use: {what} cannot listen there",
                    hint=f"Choose another {option}.",
                )
            self._given.add(wanted)
            return wanted
        return self.next_free(what, usual, option)

    def next_free(self, what: str, first: int, option: str) -> int:
        """Returns the first free port from `first` on. Raises ConfigError if the next 100 ports are in use."""
        last = min(first + TRIED - 1, 65535)
        for port in range(first, last + 1):
            if port not in self._given and self._is_free(port):
                self._given.add(port)
                return port
        raise ConfigError(f"no port from {first} to {last} is free for {what}", hint=f"Choose a port with {option}.")

    def _is_free(self, port: int) -> bool:
        try:
            return is_free(self._host, port)
        except OSError as error:
            problem = f"cannot listen on port {port} of {self._host}: {error.strerror}"
            raise ConfigError(problem, hint="Choose another port.") from None
