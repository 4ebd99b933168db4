"""Adaptation of a causal language model into a masked diffusion model: corpus, examples, LoRA, training, scores."""
