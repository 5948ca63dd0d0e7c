"""The suggestion in errors about names that do not exist."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_LONGEST = 100  # characters of a name that may be a misspelling
_SIMILAR = 0.6  # ratio of matching characters from which a name may be a misspelling


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """The nearest known name to an unknown one; `None` if none is similar.

    The last parts of dotted names are compared too, for an option that was given without its group.
    """

    def similarity(candidate: str) -> float:
        pairs = ((name, candidate), (name.rpartition(".")[2], candidate.rpartition(".")[2]))
        return max(SequenceMatcher(None, a, b).ratio() for a, b in pairs)

    if len(name) > _LONGEST:
        return None
    nearest = max(known, key=similarity, default="")
    return nearest if nearest and similarity(nearest) >= _SIMILAR else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, if one is similar."""
    nearest = find_nearest(name, known)
    return "" if nearest is None else f"; did you mean {nearest}?"
