"""Transactions on the broker: the journal on disk, and the commands for branches."""
