"""Data files → samples; predictions → scores."""
