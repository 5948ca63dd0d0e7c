"""The loader of configurations: the one of `lit_callbacks`, for the flags of jsonargparse too."""

from collections.abc import Iterator
from contextlib import contextmanager

# private, but only this loader reads the text of a flag: see keep_other_bases_as_text
from jsonargparse._loaders_dumpers import get_yaml_default_loader

from lit_callbacks.yaml_reading import MAX_BYTES as MAX_BYTES
from lit_callbacks.yaml_reading import StrictLoader
from lit_callbacks.yaml_reading import load_yaml as load_yaml
from lit_callbacks.yaml_reading import read_yaml as read_yaml


@contextmanager
def keep_other_bases_as_text() -> Iterator[None]:
    """Have jsonargparse take `1:30` and `010` for text inside the block, in flags of numbers too.

    The text of a flag is not read by the loader that a parser has, but by jsonargparse's own
    (4.53), which has no public name. A number in quotes in a file is read by it, too.
    """
    loader = get_yaml_default_loader()  # type: ignore[no-untyped-call]
    before = loader.yaml_implicit_resolvers
    loader.yaml_implicit_resolvers = StrictLoader.yaml_implicit_resolvers
    try:
        yield
    finally:
        loader.yaml_implicit_resolvers = before
