"""The broker's rules for transactions, without I/O: what a branch may do, and the state that the journal gives."""
