"""How bad it is: the level of one monitor, and of all of them together."""

from __future__ import annotations

from enum import IntEnum


class Level(IntEnum):
    """The three levels, from good to bad; they compare as numbers."""

    HEALTHY = 0
    SUSPICIOUS = 1
    COLLAPSED = 2

    @property
    def word(self) -> str:
        """The level in a word, for example ``suspicious``."""
        return self.name.lower()

    @classmethod
    def named(cls, argument: str, word: str) -> Level:
        """The level that `word` names.

        Args:
            argument: name of the argument that holds the word, for the error.
            word: ``healthy``, ``suspicious`` or ``collapsed``.

        Raises:
            ValueError: for any other word.
        """
        words = {level.word: level for level in cls}
        if word not in words:
            raise ValueError(f"{argument}: expected one of {', '.join(words)}, got {word!r}")
        return words[word]
