"""Compose with the profile `ensemble`: writes go on while one of three servers is cut off, frozen or killed."""

from __future__ import annotations

from tests.containers.conftest import CONTAINERS, ZOOKEEPERS, Composition, freeze
from tests.containers.under_load import BROKER_ID, UnderLoad
from tests.parts import wait_until

pytestmark = CONTAINERS

MODE = (
    "import socket; c = socket.create_connection(('127.0.0.1', 2181), 2); c.sendall(b'srvr'); "
    "print(c.makefile().read().partition('Mode: ')[2].split()[:1])"
)


def modes(composition: Composition, services: tuple[str, ...] = ZOOKEEPERS) -> dict[str, str]:
    """Returns "leader" or "follower" for each service that serves clients."""
    found = {name: str(composition.container(name).exec_run(["python", "-c", MODE]).output) for name in services}
    return {name: mode for name, output in found.items() for mode in ("leader", "follower") if mode in output}


def leader(composition: Composition) -> str:
    wait_until(lambda: sorted(modes(composition).values()) == ["follower", "follower", "leader"], 120, "an ensemble")
    return next(name for name, mode in modes(composition).items() if mode == "leader")


def others_choose(composition: Composition, former: str) -> None:
    others = tuple(name for name in ZOOKEEPERS if name != former)
    wait_until(lambda: "leader" in modes(composition, others).values(), 120, "another leader")


def the_master_stays(composition: Composition, load: UnderLoad) -> None:
    load.wait_for_more()
    assert composition.roles(load.admin, BROKER_ID) == {"master": load.master, "slave": load.slave}


def test_a_leader_that_is_cut_off_its_network(with_ensemble: Composition) -> None:
    former = leader(with_ensemble)
    for name in ZOOKEEPERS:
        wait_until(
            lambda name=name: with_ensemble.state(name)["Health"]["Status"] == "healthy", 120, "a healthy server"
        )
    with UnderLoad(with_ensemble, "cut-off") as load:
        container, network = with_ensemble.container(former), with_ensemble.network()
        network.disconnect(container)
        others_choose(with_ensemble, former)
        load.wait_for_more()
        network.connect(container, aliases=[former])
        leader(with_ensemble)
        the_master_stays(with_ensemble, load)


def test_a_leader_that_is_killed(with_ensemble: Composition) -> None:
    former = leader(with_ensemble)
    with UnderLoad(with_ensemble, "killed") as load:
        container = with_ensemble.container(former)
        container.kill()
        others_choose(with_ensemble, former)
        load.wait_for_more()
        container.start()
        leader(with_ensemble)
        the_master_stays(with_ensemble, load)


def test_a_follower_that_is_frozen(with_ensemble: Composition) -> None:
    frozen = next(name for name in ZOOKEEPERS if name != leader(with_ensemble))
    with UnderLoad(with_ensemble, "frozen") as load:
        container = with_ensemble.container(frozen)
        freeze(container)
        load.wait_for_more()
        container.unpause()
        leader(with_ensemble)
        the_master_stays(with_ensemble, load)
