"""Training of the small models that floatscope compares: the twins, and adapters for causal models."""
