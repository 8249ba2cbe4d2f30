"""Producers: messages become batches, and batches are sent."""
