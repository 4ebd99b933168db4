"""The verbs: decode, watch, trace, evaluate, stress, intervene, study, lens, likelihood."""
