"""`python -m parabolic`: the same as the command `parabolic`."""

from parabolic.cli import main

if __name__ == "__main__":
    main()
