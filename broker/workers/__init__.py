"""`metamq broker --processes`: a supervisor, and a worker process for each of its broker ids."""
