"""The files of a partition log: segments, indexes, and the files derived from them."""
