"""``python -m algos``."""

from algos.cli import main

main()
