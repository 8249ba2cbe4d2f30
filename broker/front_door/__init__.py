"""Requests: connections, limits, and the processors of commands."""
