"""Files and folders that stay whole: atomic replacement, and locks against a second run.

- `partial_path`, `save_durably` and `move_into_place` write a file or folder under a hidden name
  and give it its name when it is complete and on disk.
- `FolderLocks` keeps two runs from writing to one folder.
- `write_text` and `write_json_lines` write the results of commands; `ProgressFile` keeps the
  finished batches of one that is interrupted.
"""

from lit_callbacks import name_file
from lit_rlhf.files.atomic_io import (
    PARTIAL,
    REPLACED,
    delete,
    delete_partials,
    file_crc32,
    fsync,
    move_into_place,
    partial_path,
    replaced_path,
    save_durably,
    try_swap_names,
    undo_interrupted_replacement,
)
from lit_rlhf.files.locks import FolderInUseError, FolderLocks, lock_path
from lit_rlhf.files.results import (
    ProgressFile,
    json_lines,
    write_json_lines,
    write_text,
)

__all__ = [
    "PARTIAL",
    "REPLACED",
    "FolderInUseError",
    "FolderLocks",
    "ProgressFile",
    "delete",
    "delete_partials",
    "file_crc32",
    "fsync",
    "json_lines",
    "lock_path",
    "move_into_place",
    "name_file",
    "partial_path",
    "replaced_path",
    "save_durably",
    "try_swap_names",
    "undo_interrupted_replacement",
    "write_json_lines",
    "write_text",
]
