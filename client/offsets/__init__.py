"""The storages of a group's offsets: ZooKeeper, a file, or a database."""
