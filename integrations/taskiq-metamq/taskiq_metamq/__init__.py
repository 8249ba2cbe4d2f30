"""A broker of taskiq that keeps tasks in a topic of metamq: `MetamqBroker`."""

from taskiq_metamq.broker import MetamqBroker

__all__ = ["MetamqBroker"]
