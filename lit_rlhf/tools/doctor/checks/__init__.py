"""The checks, by what they look at. Each takes a `Case` and returns a `Finding`."""
