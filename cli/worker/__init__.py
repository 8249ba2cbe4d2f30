"""`metamq worker`: runs a function of a user with each message."""
