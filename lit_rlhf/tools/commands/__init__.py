"""Commands of the tools: a module each, see `lit_rlhf.cli.registry.COMMANDS`."""
