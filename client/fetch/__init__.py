"""The fetch queue with its delayed runners, and what they bring: batches, and offsets to commit."""
