"""The demo: real flights through a real cluster, with faults."""
