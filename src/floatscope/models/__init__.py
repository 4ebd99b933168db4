"""A checkpoint name → `Model`: a native transformers module, its tokenizer, and the facts the weights do not hold."""
