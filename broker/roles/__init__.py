"""The role of a replica: master, slave, or waiting; who exchanges it, and when a slave takes over by itself."""
