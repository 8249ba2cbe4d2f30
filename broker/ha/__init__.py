"""Replication: the links between a master and its slaves, and the in-sync set."""
