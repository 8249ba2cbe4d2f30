"""Where a group's offsets are stored: ZooKeeper, a file, or a database."""
