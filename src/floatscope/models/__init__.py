"""Checkpoints → `Model`: a transformers module with its tokenizer and the facts that its weights do not say."""
