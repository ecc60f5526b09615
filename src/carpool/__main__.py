"""`python -m carpool`: the command line, if `carpool` is not on the path."""

from carpool.cli.main import main

if __name__ == "__main__":
    main()
