"""Benchmarks before and after alignment: lm-evaluation-harness, and multiple choice from files."""

from lit_rlhf.tools.evaluation.benchmarks.alignment_tax import (
    BenchmarkReport,
    BenchmarkRow,
    BenchmarkScore,
    benchmark_table,
    print_benchmarks,
    run_benchmarks,
)
from lit_rlhf.tools.evaluation.benchmarks.choices import ChoiceQuestion, read_questions

__all__ = [
    "BenchmarkReport",
    "BenchmarkRow",
    "BenchmarkScore",
    "ChoiceQuestion",
    "benchmark_table",
    "print_benchmarks",
    "read_questions",
    "run_benchmarks",
]
