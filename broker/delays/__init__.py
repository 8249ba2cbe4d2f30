"""Delayed messages: they wait in logs of their broker, which moves them to their topics when they are due."""
