"""The fetch queue with its runners, and their results: batches, and offsets to commit."""
