"""`python -m triplane_dagster.cli` is `triplane`."""

from triplane_dagster.cli import main

main()
