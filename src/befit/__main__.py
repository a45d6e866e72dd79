"""`python -m befit` is the command line."""

from befit.cli.main import main

main()
