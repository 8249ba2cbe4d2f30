"""A master in a container is cut off, frozen or killed under load, and its slave takes over by itself.

Nothing that was acknowledged is lost, and the former master comes back as a slave, by itself.
"""

from __future__ import annotations

from tests.containers.conftest import CONTAINERS, Composition, freeze
from tests.containers.under_load import BROKER_ID, UnderLoad
from tests.parts import wait_until

pytestmark = CONTAINERS


def the_slave_takes_over(composition: Composition, load: UnderLoad) -> None:
    wait_until(lambda: composition.roles(load.admin, BROKER_ID).get("master") == load.slave, 120, "the switch")
    load.wait_for_more()


def comes_back_as_a_slave(composition: Composition, load: UnderLoad) -> None:
    composition.wait_in_sync(load.admin, BROKER_ID)
    load.wait_for_more()
    assert composition.roles(load.admin, BROKER_ID) == {"master": load.slave, "slave": load.master}


def test_a_master_that_is_cut_off_its_network(composition: Composition) -> None:
    with UnderLoad(composition, "cut-off") as load:
        container, network = composition.container(load.master), composition.network()
        network.disconnect(container)
        the_slave_takes_over(composition, load)
        network.connect(container, aliases=[load.master])
        comes_back_as_a_slave(composition, load)


def test_a_master_that_is_frozen(composition: Composition) -> None:
    with UnderLoad(composition, "frozen") as load:
        container = composition.container(load.master)
        freeze(container)
        the_slave_takes_over(composition, load)
        container.unpause()
        comes_back_as_a_slave(composition, load)


def test_a_master_that_is_killed(composition: Composition) -> None:
    with UnderLoad(composition, "killed") as load:
        container = composition.container(load.master)
        container.kill()
        the_slave_takes_over(composition, load)
        container.start()
        comes_back_as_a_slave(composition, load)


def test_a_slave_that_is_cut_off_is_let_go_and_comes_back(composition: Composition) -> None:
    with UnderLoad(composition, "slave-cut-off") as load:
        container, network = composition.container(load.slave), composition.network()
        network.disconnect(container)
        load.wait_for_more()
        network.connect(container, aliases=[load.slave])
        composition.wait_in_sync(load.admin, BROKER_ID)
        load.wait_for_more()
