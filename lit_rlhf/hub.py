"""Whether the Hugging Face hub can be reached, before its libraries ask it for minutes."""

from functools import cache
from typing import Literal

import httpx2
from huggingface_hub import constants, is_offline_mode, try_to_load_from_cache

_SECONDS = 5.0  # until the hub counts as out of reach


def find_hub_problem(repository: str, file: str, kind: Literal["model", "dataset"]) -> str | None:
    """Why a repository of the hub cannot be loaded, if the hub cannot be reached.

    The libraries of the hub try each file again and again, for a minute in all. Offline mode and
    what is in the cache are left to them.

    Args:
        repository: Id of the model or dataset.
        file: Name of a file that each such repository has.
        kind: What the repository holds.

    Returns:
        The reason; `None` if the hub answers, or need not be asked.
    """
    cached = try_to_load_from_cache(repository, file, repo_type=kind)
    if is_offline_mode() or isinstance(cached, str):
        return None
    problem = _try_connection(constants.ENDPOINT)
    return problem and f"the hub at {constants.ENDPOINT} cannot be reached: {problem}"


@cache
def _try_connection(endpoint: str) -> str | None:
    """Why no server answers at an address; `None` if one does."""
    try:
        httpx2.head(endpoint, timeout=_SECONDS)
    except httpx2.TransportError as error:
        return str(error) or type(error).__name__
    return None
