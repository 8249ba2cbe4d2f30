"""`metamq bundle`: one file with all that a support engineer asks for, without secrets and messages."""
