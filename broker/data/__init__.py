"""A broker's data folder: topics, partitions, what flushes them and what reports and restores them."""
