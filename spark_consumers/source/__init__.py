"""What a task of a query reads, and how."""
