"""The command line: words → calls, one module per command. The work is done in the other packages."""
