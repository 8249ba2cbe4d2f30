"""Requests: from connections, within limits, to what carries them out."""
