"""`python -m parabolic` is the command `parabolic`."""

from parabolic.cli import main

main()
