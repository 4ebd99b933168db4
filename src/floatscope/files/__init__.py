"""File utilities: atomic writes, digests, sizes, JSON files."""
