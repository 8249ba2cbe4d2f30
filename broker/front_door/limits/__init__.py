"""Limits that keep one client from taking a broker from the others: connections, memory, work, quotas."""
