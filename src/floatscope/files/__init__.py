"""Files on disk: atomic writes, JSON, digests, locks, sizes. Nothing here needs torch."""
