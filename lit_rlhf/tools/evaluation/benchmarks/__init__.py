"""Benchmarks before and after alignment: lm-evaluation-harness, and multiple choice from files."""

from lit_rlhf.tools.evaluation.benchmarks.alignment_tax import print_benchmarks as print_benchmarks
from lit_rlhf.tools.evaluation.benchmarks.alignment_tax import run_benchmarks as run_benchmarks
