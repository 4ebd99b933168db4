"""What every training has in common: legs that can be broken off, rows made ahead, checkpoints, records, cards."""
