"""Files and folders that stay whole: atomic replacement, and locks against a second run.

A file or folder is written under a hidden name, and gets its own when it is complete and on disk. A
manifest keeps what it was made from and the hashes of its files.
"""

from lit_callbacks.files import RepeatedKeyError as RepeatedKeyError
from lit_callbacks.files import append_to as append_to
from lit_callbacks.files import begins_like as begins_like
from lit_callbacks.files import find_repeated as find_repeated
from lit_callbacks.files import fsync as fsync
from lit_callbacks.files import json_lines as json_lines
from lit_callbacks.files import name_file as name_file
from lit_callbacks.files import parse_json as parse_json
from lit_callbacks.files import read_json as read_json
from lit_callbacks.files import read_text as read_text
from lit_callbacks.files import replace_file as replace_file
from lit_callbacks.files import split_lines as split_lines
from lit_callbacks.files import write_text as write_text
from lit_rlhf.files.atomic_io import PARTIAL as PARTIAL
from lit_rlhf.files.atomic_io import REPLACED as REPLACED
from lit_rlhf.files.atomic_io import delete as delete
from lit_rlhf.files.atomic_io import delete_partials as delete_partials
from lit_rlhf.files.atomic_io import file_crc32 as file_crc32
from lit_rlhf.files.atomic_io import move_into_place as move_into_place
from lit_rlhf.files.atomic_io import partial_path as partial_path
from lit_rlhf.files.atomic_io import save_durably as save_durably
from lit_rlhf.files.atomic_io import try_replacement as try_replacement
from lit_rlhf.files.atomic_io import undo_interrupted_replacement as undo_interrupted_replacement
from lit_rlhf.files.locks import FolderInUseError as FolderInUseError
from lit_rlhf.files.locks import FolderLocks as FolderLocks
from lit_rlhf.files.locks import lock_outputs as lock_outputs
from lit_rlhf.files.locks import lock_path as lock_path
from lit_rlhf.files.manifest import MANIFEST as MANIFEST
from lit_rlhf.files.manifest import check_model_files as check_model_files
from lit_rlhf.files.manifest import check_responses as check_responses
from lit_rlhf.files.manifest import code_versions as code_versions
from lit_rlhf.files.manifest import find_changed_files as find_changed_files
from lit_rlhf.files.manifest import hash_files as hash_files
from lit_rlhf.files.manifest import hash_model as hash_model
from lit_rlhf.files.manifest import listed_files as listed_files
from lit_rlhf.files.manifest import manifest_path as manifest_path
from lit_rlhf.files.manifest import read_manifest as read_manifest
from lit_rlhf.files.manifest import write_manifest as write_manifest
from lit_rlhf.files.results import ProgressFile as ProgressFile
from lit_rlhf.files.results import write_json_lines as write_json_lines
from lit_rlhf.paths import check_outputs as check_outputs
