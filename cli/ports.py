"""Ports for servers that `metamq up` starts: the wanted one, else the usual one or the next that is free."""

from __future__ import annotations

from metamq.errors import ConfigError
from metamq.zk.server.ports import is_free

TRIED = 100


class Ports:
    """Ports of one address. None is given out twice: servers that are being started do not listen yet."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._given: set[int] = set()

    def take(self, what: str, wanted: int | None, usual: int, option: str) -> int:
        """The port for `what`; 0, when that is wanted, lets the system choose. Raises ConfigError when it is taken."""
        if wanted is not None:
            if wanted and not self._is_free(wanted):
                raise ConfigError(
                    f"port {wanted} of {self._host} is taken, {what} cannot listen there",
                    hint=f"Choose another {option}.",
                )
            self._given.add(wanted)
            return wanted
        return self.next_free(what, usual, option)

    def next_free(self, what: str, first: int, option: str) -> int:
        """The first free port from this one on. Raises ConfigError when there is none near."""
        last = min(first + TRIED - 1, 65535)
        for port in range(first, last + 1):
            if port not in self._given and self._is_free(port):
                self._given.add(port)
                return port
        raise ConfigError(f"no port from {first} to {last} is free for {what}", hint=f"Give {option}.")

    def _is_free(self, port: int) -> bool:
        try:
            return is_free(self._host, port)
        except OSError as error:
            problem = f"cannot listen on port {port} of {self._host}: {error.strerror}"
            raise ConfigError(problem, hint="Choose another.") from None
