"""Znodes of security: users, rules of rights, quotas, tokens. Administrators keep them, and brokers follow them."""
