"""The loader of configurations: the one of `lit_callbacks`, for the flags of jsonargparse too."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# private, but only this module reads the text of a flag: see `strict_flags`
from jsonargparse import _loaders_dumpers

from lit_callbacks.yaml_reading import MAX_BYTES as MAX_BYTES
from lit_callbacks.yaml_reading import StrictLoader, check_yaml
from lit_callbacks.yaml_reading import load_yaml as load_yaml
from lit_callbacks.yaml_reading import read_yaml as read_yaml

_load_flag = _loaders_dumpers.yaml_load


@contextmanager
def strict_flags() -> Iterator[None]:
    """Have jsonargparse read the text of flags as strictly as a configuration inside the block.

    `1:30` and `010` are text, in flags of numbers too, and what `load_yaml` refuses is no YAML.
    The text of a flag is not read by the loader that a parser has, but by jsonargparse's own
    (4.53), which has no public name. A number in quotes in a file is read by it, too.
    """
    loader = _loaders_dumpers.get_yaml_default_loader()  # type: ignore[no-untyped-call]
    before = loader.yaml_implicit_resolvers
    loader.yaml_implicit_resolvers = StrictLoader.yaml_implicit_resolvers
    _loaders_dumpers.yaml_load = _loaders_dumpers.loaders["yaml"] = _load_strictly
    try:
        yield
    finally:
        loader.yaml_implicit_resolvers = before
        _loaders_dumpers.yaml_load = _loaders_dumpers.loaders["yaml"] = _load_flag


def _load_strictly(text: str) -> Any:  # noqa: ANN401  # whatever the text holds
    check_yaml(text)
    return _load_flag(text)  # type: ignore[no-untyped-call]
