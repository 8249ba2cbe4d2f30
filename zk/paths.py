"""Znode paths.

    /meta/cluster                                                              persistent.
    /meta/brokers/ids/<broker id>/master, slave<replica>                       ephemeral.
    /meta/brokers/ids/<broker id>/state, failover, had-slaves, delays          persistent.
    /meta/brokers/topics-pub|topics-sub/<topic>/<broker id>-m|-s<replica>      ephemeral.
    /meta/config/topics/<topic>                                                persistent.
    /meta/config/topic-defaults                                                persistent.
    /meta/security/users, rights, quotas, delegations, owner-key               persistent.
    /meta/consumers/<group>/ids/<consumer>                                     ephemeral.
    /meta/consumers/<group>/plan, settled                                      persistent.
    /meta/consumers/<group>/owners/<topic>/<partition>                         ephemeral.
    /meta/consumers/<group>/offsets/<topic>/<partition>                        persistent.
    /meta/spark/<sink>/<batch id>                                              persistent.

Callers check names in their public APIs (`metamq.zk.names`); this module does not check them again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from metamq.zk.names import check_path

DEFAULT_ROOT = "/meta"
_SLAVE_OFFER = re.compile(r"([0-9]{1,9})-s([0-9]{1,9})")


@dataclass(frozen=True)
class Paths:
    """The znode paths below `root`. Raises ConfigError if the root is not an absolute path of plain names."""

    root: str = DEFAULT_ROOT

    def __post_init__(self) -> None:
        check_path(self.root, "the root in ZooKeeper")

    def cluster(self) -> str:
        return f"{self.root}/cluster"

    def broker_ids(self) -> str:
        return f"{self.root}/brokers/ids"

    def broker(self, broker_id: int) -> str:
        return f"{self.broker_ids()}/{broker_id}"

    def master(self, broker_id: int) -> str:
        return f"{self.broker(broker_id)}/master"

    def slave(self, broker_id: int, replica: int) -> str:
        return f"{self.broker(broker_id)}/slave{replica}"

    def had_slaves(self, broker_id: int) -> str:
        return f"{self.broker(broker_id)}/had-slaves"

    def broker_state(self, broker_id: int) -> str:
        return f"{self.broker(broker_id)}/state"

    def delays(self, broker_id: int) -> str:
        return f"{self.broker(broker_id)}/delays"

    def failover(self, broker_id: int) -> str:
        return f"{self.broker(broker_id)}/failover"

    def offered_topics(self, kind: str) -> str:
        """`kind` is the purpose of the offers: "topics-pub" for writing, "topics-sub" for reading."""
        return f"{self.root}/brokers/{kind}"

    def offers(self, kind: str, topic: str) -> str:
        return f"{self.offered_topics(kind)}/{topic}"

    def offered_topic(self, kind: str, topic: str, name: str) -> str:
        """`name` is the offering replica: `master_offer` or `slave_offer`."""
        return f"{self.offers(kind, topic)}/{name}"

    def topic_defaults(self) -> str:
        return f"{self.root}/config/topic-defaults"

    def topic_configs(self) -> str:
        return f"{self.root}/config/topics"

    def topic_config(self, topic: str) -> str:
        return f"{self.topic_configs()}/{topic}"

    def security(self) -> str:
        return f"{self.root}/security"

    def users(self) -> str:
        return f"{self.security()}/users"

    def rights(self) -> str:
        return f"{self.security()}/rights"

    def delegations(self) -> str:
        return f"{self.security()}/delegations"

    def owner_key(self) -> str:
        return f"{self.security()}/owner-key"

    def quotas(self) -> str:
        return f"{self.security()}/quotas"

    def groups(self) -> str:
        return f"{self.root}/consumers"

    def group(self, group: str) -> str:
        return f"{self.groups()}/{group}"

    def members(self, group: str) -> str:
        return f"{self.group(group)}/ids"

    def member(self, group: str, consumer_id: str) -> str:
        return f"{self.members(group)}/{consumer_id}"

    def plan(self, group: str) -> str:
        return f"{self.group(group)}/plan"

    def owned_topics(self, group: str) -> str:
        return f"{self.group(group)}/owners"

    def owners(self, group: str, topic: str) -> str:
        return f"{self.owned_topics(group)}/{topic}"

    def owner(self, group: str, topic: str, partition: str) -> str:
        return f"{self.owners(group, topic)}/{partition}"

    def offset_topics(self, group: str) -> str:
        return f"{self.group(group)}/offsets"

    def offsets(self, group: str, topic: str) -> str:
        return f"{self.offset_topics(group)}/{topic}"

    def offset(self, group: str, topic: str, partition: str) -> str:
        return f"{self.offsets(group, topic)}/{partition}"

    def settled_letters(self, group: str) -> str:
        return f"{self.group(group)}/settled"

    def unused(self, group: str) -> str:
        return f"{self.group(group)}/unused"

    def sinks(self) -> str:
        return f"{self.root}/spark"

    def sink(self, sink: str) -> str:
        return f"{self.sinks()}/{sink}"

    def sink_decision(self, sink: str, batch_id: int) -> str:
        return f"{self.sink(sink)}/{batch_id}"


def master_offer(broker_id: int) -> str:
    """The name of a master's node that offers a topic: "0-m"."""
    return f"{broker_id}-m"


def slave_offer(broker_id: int, replica: int) -> str:
    """The name of a slave's node that offers a topic: "0-s1"."""
    return f"{broker_id}-s{replica}"


def slave_of_offer(name: str) -> tuple[int, int] | None:
    """The (broker id, replica) of a slave's offer; None for a master's offer."""
    match = _SLAVE_OFFER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None
