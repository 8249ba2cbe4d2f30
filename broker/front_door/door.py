"""FrontDoor: the parts that all connections of a broker share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from metamq.broker.front_door.audit import Audit
    from metamq.broker.front_door.fetch_session import ReplicaReadRole
    from metamq.broker.front_door.limits.admission import Admission
    from metamq.broker.front_door.limits.answer_memory import AnswerMemory
    from metamq.broker.front_door.limits.request_memory import RequestMemory
    from metamq.broker.front_door.limits.slices import Slices
    from metamq.broker.front_door.protocol import BrokerProtocol
    from metamq.broker.front_door.statistics import Counters
    from metamq.broker.front_door.writes import Writes
    from metamq.broker.transactions.processor import TransactionalCommandProcessor
    from metamq.errors import NotAuthorized
    from metamq.security.bearer import TokenVerifier
    from metamq.security.delegation import Delegations
    from metamq.security.login import Verifiers
    from metamq.security.quotas import Meter
    from metamq.security.rights import Access
    from metamq.wire.commands import HelloReply
    from metamq.wire.connection import Request

Processor = Callable[["Request", "BrokerProtocol"], None]


class Timeouts(NamedTuple):
    """Limits on idle connections, in seconds."""

    unread_s: float
    """Time without reading, while there are bytes to read."""
    idle_s: float
    """Time without a first request after HELLO. 0 is no limit."""


class UserDirectory(Protocol):
    """The users who log in: metamq.broker.process.users.KnownUsers."""

    tokens: TokenVerifier | None
    """Verifies tokens; None: tokens are not accepted."""

    def find(self, user: str) -> Verifiers | None:
        """Returns the verifiers of the user's password, or None if there is no such user."""

    def must_wait(self, address: str, user: str) -> bool:
        """True if too many logins of the user have failed, from this address."""
        ...

    def failed(self, address: str, user: str) -> None:
        """Notes a failed login."""

    def meter(self, principal: str, now_s: float) -> Meter | None:
        """Returns the principal's meter, with its present quota, or None without a quota."""

    def owner(self, user: str) -> str | None:
        """Returns the principal of a logged-in user, or None if its token has ended."""

    def expires_s(self, user: str) -> float:
        """Returns the end of the user's token, in seconds since 1970; 0: it has none."""
        ...

    @property
    def delegations(self) -> Delegations:
        """The tokens, as last read."""
        ...

    def zookeeper_proof(self, user: str) -> str:
        """Returns the user's proof of identity for ZooKeeper; empty for a login by token."""
        ...

    async def read_tokens(self) -> None:
        """Reads the tokens now. Raises ConnectError."""

    def access(self, user: str, refused: Callable[[NotAuthorized], None]) -> Access:
        """Returns the user's rights by the present rules. `refused` is called with each refusal."""
        ...


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """The parts that all connections of a broker share."""

    processors: Mapping[int, Processor]
    """The function that carries out each command. It raises the error that answers the request."""
    store_puts: Callable[[], None]
    """Stores the batches of PUTs that have arrived now. Otherwise that happens at the end of this turn of the loop."""
    read_role: ReplicaReadRole
    transactions: TransactionalCommandProcessor
    counters: Counters
    slices: Slices
    writes: Writes
    admission: Admission
    audit: Audit
    requests: RequestMemory
    answers: AnswerMemory
    timeouts: Timeouts
    greeting: Callable[[], HelloReply]
    """Returns the answer to HELLO."""
    users: UserDirectory
    connections: set[BrokerProtocol] = field(default_factory=set)
