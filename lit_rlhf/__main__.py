"""`python -m lit_rlhf`."""

from lit_rlhf.cli.main import main

main()
