"""Result files: written atomically or batch by batch, with errors that name the file."""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Self

from lit_callbacks.files import (
    append_to,
    begins_like,
    json_lines,
    name_file,
    parse_json,
    split_lines,
    write_text,
)
from lit_rlhf.files.manifest import code_versions, write_manifest


def write_json_lines(path: str | Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """Write one JSON object per line, atomically like `write_text`."""
    return write_text(path, json_lines(records))


class ProgressFile:
    """The finished batches of a command that writes a file, so that it continues after a kill.

    They are in `<output>.partial`: a line with the settings, then a line per batch. The same
    command reads them and computes the others. This is a context manager: it deletes the file when
    the context ends without an error, because the output is complete then. A damaged file, or a
    file of a command with other settings, is refused.

    `settings` is everything that the batches depend on, as JSON types. Without an `output`, nothing
    is kept.
    """

    def __init__(self, output: str | Path | None, settings: Mapping[str, Any]) -> None:
        # a device or a pipe has no file beside it
        to_file = output is not None and (Path(output).is_file() or not Path(output).exists())
        self.path = Path(f"{output}.partial") if to_file else None
        self._output = output
        self._settings = json.loads(json.dumps(settings))  # a tuple comes back as a list
        self._batches: dict[str, list[Any]] = {}
        self._opened = ExitStack()
        self._file: IO[bytes] | None = None
        self._size = 0  # bytes of the complete lines
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Close the file, and delete it unless there was an error."""
        # After a failed write, closing tries it once more; its error has been raised already.
        with suppress(OSError):
            self._opened.close()
        if error is not None and self._file is not None:
            error.add_note(f"{self.path} has what is finished; the same command continues from it")
        if self.path is not None and error is None:
            self.path.unlink(missing_ok=True)

    def batches(self, name: str) -> list[Any]:
        """The batches that an earlier command finished under a name, in their order."""
        return self._batches.get(name, [])

    def add(self, name: str, batch: Any) -> None:  # noqa: ANN401  # JSON types
        """Keep a finished batch of JSON types under a name. It has left the process on return."""
        if self.path is None:
            return
        lines = [[name, batch]]
        with name_file(self.path):
            if self._file is None:
                self._file = self._opened.enter_context(append_to(self.path))
                self._file.truncate(self._size)
                if self._size == 0:
                    lines.insert(0, self._settings)
            self._file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            self._file.flush()

    def finish(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the output as JSON lines, and its manifest, which has the settings."""
        if self._output is not None:
            path = write_json_lines(self._output, records)
            if self.path is not None:
                write_manifest(path, {"made": self._settings, "versions": code_versions()})

    def _read(self, path: Path) -> None:
        # A kill while a line is written leaves a part of it.
        content = path.read_bytes()
        try:
            lines = [line for line in split_lines(content.decode()) if line.is_complete]
            if not (lines or begins_like(content, b'{"')):
                raise ValueError("it does not begin with settings")
            begun, *batches = [parse_json(line.text) for line in lines] or [{}]
            differing = [name for name in self._settings if self._settings[name] != begun.get(name)]
            for name, batch in batches:
                self._batches.setdefault(name, []).append(batch)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: expected the finished batches of an interrupted command, got something "
                "else; delete the file to start over"
            ) from error
        if batches and differing:
            raise ValueError(
                f"{path}: expected this command's finished batches, got those of a command with "
                f"another value of {', '.join(differing)}; repeat that command to finish it, or "
                "delete the file to start over"
            )
        self._size = content.rfind(b"\n") + 1 if batches else 0
