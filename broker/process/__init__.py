"""One broker as a process: its start, its end, its HTTP port, its metrics."""
