"""The session with ZooKeeper, its lease and its watches. Only this room imports kazoo."""
