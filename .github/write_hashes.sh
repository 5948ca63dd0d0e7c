#!/usr/bin/env bash
# Writes hashes.txt: the pins of constraints.txt that a plain install needs, with the hashes of all their archives.
# torch comes from an index of its own, and pins what a CUDA build of it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{
    echo "# The requirements of lit_rlhf with the hashes of their archives. Made by .github/write_hashes.sh."
    uv pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11 \
        --python-platform x86_64-manylinux_2_28 --no-emit-package lit-callbacks --constraints constraints.txt pyproject.toml |
        awk '/^[a-z]/ { keep = !/^(torch|triton|cuda-.*|nvidia-.*)==/ } keep'
} > hashes.txt
