"""Reading topics between fixed places, as Arrow batches: metamq.scan(), and the ranges of Spark's tasks."""
