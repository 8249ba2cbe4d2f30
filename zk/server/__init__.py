"""The embedded ZooKeeper server, and the Java and the jars that it runs with."""
