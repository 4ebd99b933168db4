"""Training code that the twins and the adapters share: segments, checkpoints, prefetched batches, records, cards."""
