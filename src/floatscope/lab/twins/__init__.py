"""The twins: three small matched models, their worlds, training, scores and cards."""
