"""Spreads masters over hosts. Pure.

A host with two masters more than another one has too many. A path leads from it to the other one: each step moves the
master of one broker id from a host to the next host, where the broker id has a replica that can be the master. Moving
all masters of the path takes one master from its first host and gives one to its last. When no path is left, the
masters are spread as well as the replicas allow: no other choice has a smaller sum of squares of masters per host, so
none has a smaller maximum. Each step of a path moves one master, and shortest paths are taken.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from metamq.client.admin.admin_model import MasterPlace

if TYPE_CHECKING:
    from metamq.client.admin.admin_model import BrokerReplicas

Moves = list[tuple[int, int]]
"""(broker id, replica) of masters to make."""


def plan_balance(brokers: Mapping[int, BrokerReplicas]) -> list[MasterPlace]:
    """Returns the place of each master, in the order of broker ids. Broker ids without a master that answers are left
    out. Only replicas that are in sync can become the master."""
    masters: dict[int, int] = {}
    hosts: dict[int, dict[int, str]] = {}
    for broker_id, broker in brokers.items():
        able = [one for one in broker.replicas if one.holds_all and one.address is not None]
        master = next((one.replica for one in able if one.role == "master"), None)
        if master is not None:
            masters[broker_id] = master
            hosts[broker_id] = {one.replica: (one.address or "").rpartition(":")[0] for one in able}
    chosen = balanced(masters, hosts)
    return [
        MasterPlace(broker_id, former, hosts[broker_id][former], chosen[broker_id], hosts[broker_id][chosen[broker_id]])
        for broker_id, former in sorted(masters.items())
    ]


def balanced(masters: Mapping[int, int], hosts: Mapping[int, Mapping[int, str]]) -> dict[int, int]:
    """Returns the master of each broker id. `masters`: the present ones; `hosts`: the host of each replica that can be
    the master, by broker id."""
    chosen = dict(masters)
    while moves := _path(chosen, hosts):
        chosen.update(moves)
    return chosen


def _path(chosen: Mapping[int, int], hosts: Mapping[int, Mapping[int, str]]) -> Moves:
    """Returns the moves of a shortest path to a host with at least two masters less; [] if there is none."""
    load = Counter({host: 0 for replicas in hosts.values() for host in replicas.values()})
    load.update(hosts[broker_id][replica] for broker_id, replica in chosen.items())
    for first, masters in load.most_common():
        found: dict[str, Moves] = {first: []}
        waiting = deque([first])
        while waiting:
            host = waiting.popleft()
            if load[host] <= masters - 2:
                return found[host]
            for broker_id, replica in chosen.items():
                if hosts[broker_id][replica] == host:
                    for other, its_host in hosts[broker_id].items():
                        if its_host not in found:
                            found[its_host] = [*found[host], (broker_id, other)]
                            waiting.append(its_host)
    return []
