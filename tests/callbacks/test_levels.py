from __future__ import annotations

import pytest

from lit_callbacks.levels import Level
from tests.callbacks.watching import C, H, S


def test_levels_have_words_and_an_order() -> None:
    assert [level.word for level in (H, S, C)] == ["healthy", "suspicious", "collapsed"]
    assert H < S < C
    assert [Level.named("level", level.word) for level in Level] == [H, S, C]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(
        ValueError, match="level: expected one of healthy, suspicious, collapsed, got 'bad'"
    ):
        Level.named("level", "bad")
