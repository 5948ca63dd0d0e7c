#!/usr/bin/env bash
# Writes the pins of constraints.txt with the hashes of all their archives, in requirements/: hashes.txt has what a plain
# install needs, build_hashes.txt what builds the distributions, and DeepSpeed, which PyPI has as source only.
# torch comes from an index of its own, and pins what a CUDA build of it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

compile() {
    uv pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11 \
        --python-platform x86_64-manylinux_2_28 --constraints requirements/constraints.txt "$@"
}

{
    echo "# The requirements of lit_rlhf with the hashes of their archives. Made by .github/write_hashes.sh."
    compile --no-emit-package lit-callbacks pyproject.toml |
        awk '/^[a-z]/ { keep = !/^(torch|triton|cuda-.*|nvidia-.*)==/ } keep'
} > requirements/hashes.txt
{
    echo "# What builds lit_rlhf and DeepSpeed, with the hashes of their archives. Made by .github/write_hashes.sh."
    printf 'build\nhatchling\nsetuptools\nwheel\n' | compile -
} > requirements/build_hashes.txt
{
    echo "# Tools of workflows with the hashes of their archives. Made by .github/write_hashes.sh."
    printf 'pip-audit==2.10.1\nuv==0.13.9\n' | compile -
} > requirements/tool_hashes.txt
