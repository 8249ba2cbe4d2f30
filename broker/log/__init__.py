"""The partition log: segments, indexes, producer states, recovery. Synchronous; only slow steps use other threads."""
