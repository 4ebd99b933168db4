"""Capture: run the attention of a model with its own kernel and reduce it, exactly and without a [T, T] matrix."""
