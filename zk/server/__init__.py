"""The embedded ZooKeeper server, and its Java and jars."""
