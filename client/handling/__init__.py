"""The calls of handlers by `run()`: their figures, the rules of retries, and dead letters."""
