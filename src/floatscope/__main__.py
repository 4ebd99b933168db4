"""`python -m floatscope` is `floatscope`."""

from floatscope.cli.main import main

main()
