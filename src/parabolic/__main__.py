"""`python -m parabolic`: the same as the command `parabolic`."""

from parabolic.cli import main

main()
