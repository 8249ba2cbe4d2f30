"""The files of a partition log: segments, indexes, and what is derived from them."""
