"""A broker's data folder: topics and partitions, and the code that flushes, reports and restores them."""
