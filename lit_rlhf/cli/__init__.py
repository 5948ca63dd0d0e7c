"""Command line of lit_rlhf."""
