"""Commands of the tools: a module each, with `main(argv)`."""
