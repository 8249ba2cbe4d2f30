"""Typed topics: encodings of values, schemas, and the rules of their compatibility."""
