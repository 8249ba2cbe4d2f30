"""Producers: they collect messages in batches, and send the batches."""
