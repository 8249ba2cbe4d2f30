"""The consumers of a group: who reads which partition."""
