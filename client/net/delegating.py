"""A token of this client for others: it is made, renewed and ended at all brokers (metamq.security.delegation).

The client asks each broker, although they share a list of tokens in ZooKeeper: a broker that has answered knows the
token, so its holder can log in there at once. Any other broker reads the list when it reaches ZooKeeper again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from metamq.errors import ConnectError, MetamqError, ServerBusy
from metamq.security.delegation import make_token, verifier_of
from metamq.wire.commands import Command, Delegate, Delegated, DelegatedRight
from metamq.wire.headers import unpack

if TYPE_CHECKING:
    from metamq.client.net.cluster import ClusterClient
    from metamq.security.config import DelegatedConfig, SecurityConfig
    from metamq.zk.cluster.registrations import BrokerAddress

log = logging.getLogger("metamq.client")

ANSWER_S = 15.0
BUSY_PAUSE_S = 0.05
RENEWALS_A_LIFETIME = 3
RETRY_S = 5.0


class DelegatedToken:
    """A token. Use it in the loop of the cluster's client."""

    def __init__(
        self, cluster: ClusterClient, config: DelegatedConfig, rights: frozenset[tuple[str, str]], lifetime_s: float
    ) -> None:
        """`config` are the settings of the token's holders; `rights` are (right, topic)."""
        self.rights = rights
        self.config = config
        self._cluster = cluster
        self._lifetime_s = lifetime_s
        self._verifier = verifier_of(config)

    @classmethod
    def new(
        cls,
        cluster: ClusterClient,
        config: SecurityConfig,
        rights: frozenset[tuple[str, str]],
        lifetime_s: float,
        seed: bytes | None = None,
    ) -> DelegatedToken:
        """Returns a token, which renew() makes at brokers. `config` is the security of this client. The same `seed`
        gives the same token; None gives a new one. Raises ConfigError."""
        return cls(cluster, make_token(config, seed), rights, lifetime_s)

    async def renew(self) -> None:
        """Makes or renews the token at all brokers that answer. A token with half of its lifetime left does not change.

        Raises ConnectError if no broker answers, NotAuthorized if this client lacks the rights, ConfigError.
        """
        masters = list((await self._cluster.refresh_brokers()).values())
        others = [slave for slaves in self._cluster.slaves.values() for slave in slaves.values()]
        failure: MetamqError = ConnectError("a broker", "none runs, and only brokers make tokens")
        while masters:  # one broker makes the token, and the others find it
            try:
                await self._ask(masters.pop(0), self._lifetime_s)
                break
            except MetamqError as error:
                failure = error
                if not error.retriable:
                    raise
        else:
            raise failure
        await self._ask_all([*masters, *others], self._lifetime_s)

    async def keep(self) -> None:
        """Renews the token until the task is cancelled."""
        while True:
            await asyncio.sleep(self._lifetime_s / RENEWALS_A_LIFETIME)
            while True:
                try:
                    await self.renew()
                    break
                except MetamqError as error:
                    log.warning("a token cannot be renewed at present: %s", error)
                    await asyncio.sleep(RETRY_S)

    async def end(self) -> None:
        """Ends the token at all brokers that answer. If none does, the token expires."""
        masters = list((await self._cluster.refresh_brokers()).values())
        await self._ask_all(masters, 0)

    async def _ask_all(self, addresses: list[BrokerAddress], lifetime_s: float) -> None:
        answers = await asyncio.gather(*(self._ask(at, lifetime_s) for at in addresses), return_exceptions=True)
        for at, answer in zip(addresses, answers, strict=True):
            if isinstance(answer, MetamqError):
                does = "renews" if lifetime_s else "ends"
                log.info("broker %d neither makes nor %s a token: %s", at.broker_id, does, answer)
            elif isinstance(answer, BaseException):
                raise answer

    async def _ask(self, at: BrokerAddress, lifetime_s: float) -> Delegated:
        rights = [DelegatedRight(*one) for one in sorted(self.rights)]
        request = Delegate(self.config.token_id, rights, int(lifetime_s), *self._verifier)
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            connection = await self._cluster.connections.get(at)
            try:
                return unpack(Delegated, await connection.request(Command.DELEGATE, request, timeout_s=ANSWER_S))
            except ServerBusy:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(BUSY_PAUSE_S)
