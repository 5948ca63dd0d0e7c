"""Benchmarks before and after alignment: lm-evaluation-harness and local multiple choice."""

from lit_rlhf.evaluation.benchmarks.comparison import (
    BenchmarkReport,
    BenchmarkRow,
    BenchmarkScore,
)
from lit_rlhf.evaluation.benchmarks.local_choices import ChoiceQuestion, local_questions
from lit_rlhf.evaluation.benchmarks.scores import benchmark_scores
from lit_rlhf.evaluation.benchmarks.tables import benchmark_table, print_benchmarks

__all__ = [
    "BenchmarkReport",
    "BenchmarkRow",
    "BenchmarkScore",
    "ChoiceQuestion",
    "benchmark_scores",
    "benchmark_table",
    "local_questions",
    "print_benchmarks",
]
