"""Benchmarks before and after alignment: lm-evaluation-harness, and multiple choice from files."""

from lit_rlhf.tools.evaluation.benchmarks.alignment_tax import print_benchmarks, run_benchmarks

__all__ = ["print_benchmarks", "run_benchmarks"]
