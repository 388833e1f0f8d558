"""`python -m worker` is `v4flash`."""

from worker.cli import main

main()
