"""Files and folders that stay whole: atomic replacement, and locks against a second run.

- `partial_path`, `save_durably` and `move_into_place` write a file or folder under a hidden name
  and give it its name when it is complete and on disk.
- `write_manifest`, `read_manifest` and `check_weights` keep what a folder was made from and the
  hashes of its files.
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
from lit_rlhf.files.manifest import (
    MANIFEST,
    check_weights,
    code_versions,
    hash_files,
    hash_weights,
    listed_files,
    read_manifest,
    write_manifest,
)
from lit_rlhf.files.results import (
    ProgressFile,
    json_lines,
    write_json_lines,
    write_text,
)

__all__ = [
    "MANIFEST",
    "PARTIAL",
    "REPLACED",
    "FolderInUseError",
    "FolderLocks",
    "ProgressFile",
    "check_weights",
    "code_versions",
    "delete",
    "delete_partials",
    "file_crc32",
    "fsync",
    "hash_files",
    "hash_weights",
    "json_lines",
    "listed_files",
    "lock_path",
    "move_into_place",
    "name_file",
    "partial_path",
    "read_manifest",
    "replaced_path",
    "save_durably",
    "try_swap_names",
    "undo_interrupted_replacement",
    "write_json_lines",
    "write_manifest",
    "write_text",
]
