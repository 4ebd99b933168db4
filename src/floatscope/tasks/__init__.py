"""Question answering tasks: sample files, prompt templates, retrieval, stress sweeps and scores. No torch needed."""
