"""The broker's rules for transactions, without I/O: the allowed verbs, and the state that the journal gives."""
