"""Training: the twins, the adapters, and what both trainings share."""
