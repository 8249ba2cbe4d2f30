"""The role of a replica (master, slave or waiting), its exchange, and the automatic take-over by a slave."""
