"""A causal language model → a masked diffusion model: its rows, its losses, its small matrices, its legs."""
