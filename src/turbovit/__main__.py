"""``python -m turbovit`` is the `turbovit` command."""

from turbovit.cli import main

if __name__ == "__main__":
    main()
