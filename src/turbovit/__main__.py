"""``python -m turbovit`` is the `turbovit` command."""

from turbovit.cli import main

main()
