"""The broker's side of transactions, without I/O: what a branch may do, what the journal says, and what follows."""
