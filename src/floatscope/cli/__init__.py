"""Words → calls. A module per command; what they do lives in the other rooms."""
