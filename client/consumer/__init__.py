"""Consumers: loops, listeners, and the end of a loop."""
