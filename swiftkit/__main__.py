"""`python -m swiftkit`."""

from swiftkit.cli import main

if __name__ == "__main__":
    main()
