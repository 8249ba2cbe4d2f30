"""The sink: the writes of tasks, and the decisions of the driver."""
