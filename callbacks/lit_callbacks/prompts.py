"""The fixed prompts of a timeline: given as texts, or read from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

SPEAKERS = {"user": "Human", "assistant": "Assistant"}


def fixed_prompts(prompts: Sequence[str] | str, n_prompts: int) -> list[str]:
    r"""The texts themselves, or the first `n_prompts` of a file.

    A file whose name ends in ``.jsonl`` holds one JSON object per line with a field ``prompt``: a
    string, or the turns of a chat, ``{"role": ..., "content": ...}``. A chat of one turn is
    that turn's text; a longer one becomes ``\n\nHuman: ...\n\nAssistant: ...\n\nHuman: ...``. Any
    other file holds one prompt per line. Blank lines are skipped.

    Args:
        prompts: texts, or the path of a file.
        n_prompts: how many of a file; a shorter file gives what it has.

    Raises:
        ValueError: without any prompt, for a blank one, a file that is not there, and a line that
            cannot be used, by file and line.
    """
    if n_prompts < 1:
        raise ValueError(f"n_prompts: expected at least 1, got {n_prompts}")
    if isinstance(prompts, str):
        path = Path(prompts)
        if not path.is_file():
            raise ValueError(
                f"prompts: expected a list of texts or the path of a file, got {prompts!r}, which "
                "is no file; a single prompt goes into a list"
            )
        read = _json_prompts(path) if path.suffix == ".jsonl" else _text_prompts(path)
        texts = list(islice(read, n_prompts))
        if not texts:
            raise ValueError(f"prompts: expected at least one prompt in {path}, got none")
        return texts
    texts = list(prompts)
    if not texts:
        raise ValueError("prompts: expected at least one, got an empty list")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"prompts[{index}]: expected a text, got {text!r}")
    return texts


def _text_prompts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        yield from (line.strip() for line in lines if line.strip())


def _json_prompts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield _prompt_text(json.loads(line))
                except ValueError as error:  # a JSON error is one too
                    raise ValueError(f"prompts: {path}:{number}: {error}") from error


def _prompt_text(row: object) -> str:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, list) or not prompt:
        prompt = [{"role": "user", "content": prompt}]
    spoken = [_turn(turn) for turn in prompt]
    if len(spoken) == 1:
        return spoken[0][1]
    return "".join(f"\n\n{SPEAKERS[role]}: {content}" for role, content in spoken)


def _turn(turn: object) -> tuple[str, str]:
    role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else ("", "")
    if role not in SPEAKERS or not isinstance(content, str) or not content.strip():
        raise ValueError(
            "expected an object whose field 'prompt' is a text, or a list of turns "
            f"{{role, content}} of user and assistant, got {turn!r:.100}"
        )
    return str(role), content
