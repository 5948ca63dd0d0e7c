"""YAML that takes very long to read, unless aliases are counted."""

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
"""A file of a kilobyte that stands for 10^12 values."""
