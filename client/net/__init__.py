"""Connections to brokers, and the client's view of the cluster."""
