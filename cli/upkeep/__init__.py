"""Commands for the operator's upkeep of groups' offsets and of transactions in doubt."""
