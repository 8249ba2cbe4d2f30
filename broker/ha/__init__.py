"""Replication: the role of a replica, the links between a master and its slaves, and the in-sync set."""
