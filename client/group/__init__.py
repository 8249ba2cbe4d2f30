"""The consumers of a group, and the distribution of partitions to them."""
