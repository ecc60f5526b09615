"""`python -m carpool`: the command line, where `carpool` is not on the path."""

from carpool.cli.main import main

if __name__ == "__main__":
    main()
