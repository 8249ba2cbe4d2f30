"""The session with ZooKeeper, its lease and its watches. Only this folder imports kazoo."""
