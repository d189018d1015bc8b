"""`python -m gpusync`."""

from gpusync.cli import main

if __name__ == "__main__":
    main()
