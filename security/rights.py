"""Rights: the rules that allow and deny requests of principals, and the decision by these rules. Without I/O.

A rule allows or denies a principal one right on the topics or the cluster that it names. It may name a prefix:

    allow  etl  read   topic:orders
    allow  *    write  topic:events-*
    deny   etl  write  topic:events-audit

    a `deny` matches             no
    else an `allow` matches      yes
    else                         no

The principals of the cluster itself, `admin` and `brokers`, may do everything. No rule changes that, so a wrong rule
never locks out its administrator. Only `brokers` may join as a replica: no rule gives that right.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from metamq.errors import ConfigError, NotAuthorized
from metamq.security.config import ADMIN, BROKERS
from metamq.security.names import check_name

ALLOW, DENY = "allow", "deny"
ANY_PRINCIPAL = ANY_TOPIC = "*"
TOPIC, CLUSTER = "topic", "cluster"
READ, WRITE = "read", "write"
CREATE, ALTER, DELETE = "create", "alter", "delete"
DESCRIBE, PROMOTE, RECOVER = "describe", "promote", "recover"
RIGHTS = {TOPIC: (READ, WRITE, CREATE, ALTER, DELETE), CLUSTER: (DESCRIBE, PROMOTE, RECOVER)}
"""The rights on each kind of resource."""
_DOES = {ALLOW: "allows", DENY: "denies"}
SUPERUSERS = (ADMIN, BROKERS)
DELAYED_SUFFIX = ".delayed"
"""The suffix of a topic's name in the name of the topic that takes its delayed messages."""
LEVEL_PREFIX = "metamq.delays."
"""The prefix of the topics in which a broker keeps delayed messages."""
NAME_CHARS_MAX = 200
"""That of a topic's name: metamq.zk.names."""
PRODUCER_RANDOM_BITS = 40
"""The bits of a producer id after its prefix, which depends on the principal."""


class Resource(NamedTuple):
    """The subject of a rule: the cluster, a topic, or all topics whose names begin with a prefix."""

    kind: str
    name: str = ""
    """A topic's name, or a prefix and `*`; empty for the cluster."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind


class Rule(NamedTuple):
    """One rule."""

    effect: str
    """ALLOW or DENY."""
    principal: str
    """A name, or ANY_PRINCIPAL."""
    right: str
    resource: Resource

    def __str__(self) -> str:
        return f"{self.effect} {self.principal} {self.right} {self.resource}"


class RightDecision(NamedTuple):
    """A decision, and the rule that made it. The rule is None if no rule matches, or if none is needed."""

    is_allowed: bool
    rule: Rule | None
    reason: str
    """The reason, as a sentence."""


Rules = tuple[Rule, ...]


class _Names(NamedTuple):
    """The names and prefixes of the rules with one effect, principal, right and kind."""

    exact: frozenset[str]
    prefixes: frozenset[str]
    lengths_chars: tuple[int, ...]
    """The different lengths of the prefixes."""

    def covering(self, name: str) -> str | None:
        """Returns the name in the rule that matches this name, or None if no rule matches."""
        if name in self.exact:
            return name
        found = (name[:chars] for chars in self.lengths_chars if name[:chars] in self.prefixes)
        return next((f"{prefix}*" for prefix in found), None)


def governing(right: str, resource: Resource) -> tuple[str, Resource]:
    """Returns the right on a resource that decides: for the topic of delayed messages, a right on the topic that they
    are for. A writer may make it."""
    if not resource.name.endswith(DELAYED_SUFFIX):
        return right, resource
    return WRITE if right == CREATE else right, resource._replace(name=resource.name.removesuffix(DELAYED_SUFFIX))


class RuleTable:
    """Rules, indexed for fast decisions: there may be many rules, and clients choose the names to look up."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = frozenset(rules)
        names: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
        for effect, principal, right, (kind, name) in self.rules:
            names[effect, principal, right, kind].append(name)
        self._names = {key: _made(found) for key, found in names.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RuleTable) and self.rules == other.rules

    def __hash__(self) -> int:
        return hash(self.rules)

    def decide(self, principal: str, right: str, resource: Resource) -> RightDecision:
        """Decides if the principal has the right."""
        if principal in SUPERUSERS:
            return RightDecision(True, None, f"{principal} may do everything")
        if resource.name.startswith(LEVEL_PREFIX):
            return RightDecision(False, None, "it has the delayed messages of all topics")
        asked = right, resource
        governed = governing(*asked)
        for effect, (right, resource) in ((DENY, asked), (DENY, governed), (ALLOW, governed)):
            for name in (principal, ANY_PRINCIPAL):
                names = self._names.get((effect, name, right, resource.kind))
                found = names.covering(resource.name) if names is not None else None
                if found is not None:
                    rule = Rule(effect, name, right, Resource(resource.kind, found))
                    return RightDecision(effect == ALLOW, rule, f"the rule `{rule}` {_DOES[effect]} it")
        return RightDecision(False, None, "no rule allows it")

    def gives_any(self, principal: str, right: str) -> bool:
        """True if a rule allows the principal the right on any topic."""
        return any((ALLOW, name, right, TOPIC) in self._names for name in (principal, ANY_PRINCIPAL))


def _made(names: Iterable[str]) -> _Names:
    names = list(names)
    prefixes = frozenset(name[:-1] for name in names if name.endswith("*"))
    exact = frozenset(name for name in names if not name.endswith("*"))
    return _Names(exact, prefixes, tuple(sorted({len(prefix) for prefix in prefixes})))


def parse_rule(effect: str, principal: str, right: str, resource: str) -> Rule:
    """Returns the rule that these texts describe. Raises ConfigError, which names the wrong text."""
    if effect not in (ALLOW, DENY):
        raise ConfigError(f"{effect!r} is not the effect of a rule", hint="It is `allow` or `deny`.")
    if principal != ANY_PRINCIPAL:
        check_name(principal)
    if principal in SUPERUSERS:
        raise ConfigError(f"a rule for {principal!r} has no effect: it may do everything")
    found = parse_resource(resource)
    check_right(right, found)
    return Rule(effect, principal, right, found)


def check_right(right: str, resource: Resource) -> None:
    """Raises ConfigError if there is no such right on the resource."""
    if right not in RIGHTS[resource.kind]:
        hint = f"Those of a {resource.kind} are: {', '.join(RIGHTS[resource.kind])}."
        raise ConfigError(f"{right!r} is not a right on {resource}", hint=hint)


def parse_resource(text: str) -> Resource:
    """Returns the resource that "topic:orders", "topic:orders-*" or "cluster" names. Raises ConfigError."""
    kind, _, name = text.partition(":")
    if kind not in RIGHTS or bool(name) != (kind == TOPIC) or "*" in name[:-1] or len(name) > NAME_CHARS_MAX:
        raise ConfigError(
            f"{text!r} is not a resource", hint="Write topic:NAME, or topic:PREFIX* for several topics, or cluster."
        )
    return Resource(kind, name)


def producer_prefix(principal: str) -> int:
    """Returns the first 24 bits of a principal's producer ids. Every broker computes the same bits."""
    return int.from_bytes(hashlib.sha256(principal.encode()).digest()[:3]) or 1


class Access:
    """The rights of one client. It caches the topics that it allowed, so a check costs one look-up.

    For the broker's loop only. When the rules change, it is replaced.
    """

    __slots__ = ("_allowed", "_only", "_refused", "_table", "is_limited", "principal", "producer_prefix")

    def __init__(
        self,
        principal: str,
        table: RuleTable,
        *,
        is_secure: bool = True,
        only: frozenset[tuple[str, str]] | None = None,
        refused: Callable[[NotAuthorized], None] = lambda refusal: None,
    ) -> None:
        """`is_secure` is False if security is off. `refused` is called with each refusal.

        `only` has the (right, topic) that were delegated to the client, or None if the client is the principal.
        """
        self.principal = principal
        self.is_limited = is_secure and (principal not in SUPERUSERS or only is not None)
        """False if everything is allowed."""
        self.producer_prefix = producer_prefix(principal) if is_secure else 0
        """The first bits of the producer ids that it may use; 0: any producer id."""
        self._table = table
        self._only = only
        self._refused = refused
        self._allowed: set[tuple[str, str]] = set()

    def refusal(self, right: str, topic: str) -> NotAuthorized | None:
        """Returns the reason why the client does not have the right on the topic, or None if it has the right.

        The reason does not show whether the topic exists.
        """
        if not self.is_limited or (right, topic) in self._allowed:
            return None
        resource = Resource(TOPIC, topic[:NAME_CHARS_MAX])
        if len(topic) > NAME_CHARS_MAX or not self._may(right, resource):
            return self._refusal(right, str(resource))
        if len(self._allowed) >= REMEMBERED_MAX:
            self._allowed.clear()
        self._allowed.add((right, topic))
        return None

    def check_topic(self, right: str, topic: str) -> None:
        """Raises NotAuthorized."""
        if (refusal := self.refusal(right, topic)) is not None:
            raise refusal

    def check_delegates(self, right: str, topic: str) -> None:
        """Raises NotAuthorized if the client lacks the right itself; for "*", if it has the right on no topic."""
        if topic != ANY_TOPIC:
            self.check_topic(right, topic)
        elif self.is_limited and not self._table.gives_any(self.principal, right):
            raise self._refusal(right, str(Resource(TOPIC, ANY_TOPIC)))

    def check_begins(self) -> None:
        """Raises NotAuthorized if the client may neither write to a topic nor end transactions as an operator."""
        if not self.may_begin and not self.may_recover:
            raise self._refusal(WRITE, str(Resource(TOPIC, "*")))

    @property
    def may_begin(self) -> bool:
        """True if the client may write to any topic."""
        if self._only is not None and all(right != WRITE for right, _topic in self._only):
            return False
        return self.principal in SUPERUSERS or not self.is_limited or self._table.gives_any(self.principal, WRITE)

    @property
    def may_recover(self) -> bool:
        """True if the client may see and end the transactions of others."""
        return not self.is_limited or self._may(RECOVER, Resource(CLUSTER))

    def is_owner(self, owner: str, on_behalf: str) -> bool:
        """True if this client is `owner`, the principal that began a transaction. A broker acts for all principals."""
        return owner == (on_behalf if self.principal == BROKERS else self.principal)

    def check_owner(self, owner: str, on_behalf: str) -> None:
        """Raises NotAuthorized if another principal began the transaction, and the client may not end it as an
        operator. A broker may not either: clients choose the transactions that it ends."""
        if self.is_delegated and not self.may_begin:
            raise self._refusal(WRITE, str(Resource(TOPIC, "*")))
        if not self.is_owner(owner, on_behalf) and (self.principal == BROKERS or not self.may_recover):
            raise self._refusal(
                "end or change", "this transaction: another user or certificate began it", _RECOVER_HINT
            )

    def check_cluster(self, right: str) -> None:
        """Raises NotAuthorized."""
        if self.is_limited and not self._may(right, Resource(CLUSTER)):
            raise self._refusal(right, CLUSTER)

    def check_producer(self, producer_id: int, topic: str) -> None:
        """Raises NotAuthorized if the producer id belongs to another principal; 0 is no producer id.

        With another's producer id and sequence, a client could make the broker drop the other's next batch as a repeat.
        """
        if self.is_limited and producer_id and producer_id >> PRODUCER_RANDOM_BITS != self.producer_prefix:
            raise self._refusal("use this producer id in", str(Resource(TOPIC, topic)), _PREFIX_HINT)

    def check_is_broker(self) -> None:
        """Raises NotAuthorized unless the client has the certificate of the brokers, or security is off."""
        if self.is_limited or self.principal == ADMIN:
            raise self._refusal("join as a replica of", CLUSTER, hint=f"It needs the certificate `{BROKERS}`.")

    @property
    def is_delegated(self) -> bool:
        """True if the client has only rights that another client delegated to it."""
        return self._only is not None

    def _may(self, right: str, resource: Resource) -> bool:
        if self._only is not None:
            governed, (_kind, name) = governing(right, resource)
            if (governed, name) not in self._only and (governed, ANY_TOPIC) not in self._only:
                return False
        return self._table.decide(self.principal, right, resource).is_allowed

    def _refusal(self, right: str, resource: str, hint: str | None = None) -> NotAuthorized:
        refusal = NotAuthorized(self.principal, right, resource, hint=hint)
        self._refused(refusal)
        return refusal


REMEMBERED_MAX = 1000
_RECOVER_HINT = "The right `recover cluster` allows it."
_PREFIX_HINT = "Upgrade the client to a release that takes the prefix of its producer ids from the broker."
NO_RULES = RuleTable(())
UNLIMITED = Access("", NO_RULES, is_secure=False)
"""The Access of all clients if security is off."""
