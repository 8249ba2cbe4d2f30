"""The sink: what tasks write, and what the driver decides."""
