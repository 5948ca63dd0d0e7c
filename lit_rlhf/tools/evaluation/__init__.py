"""Evaluation: policies compared on the same prompts by rewards, a judge and benchmarks.

The judge, the benchmarks, the chat and the reward model's report are packages of their own:
`lit_rlhf.tools.evaluation.judge`, `benchmarks`, `chat` and `reward_report`.
"""

from lit_rlhf.tools.evaluation.compare import (
    Comparison,
    PolicyReport,
    PolicySamples,
    compare_policies,
    comparison_table,
    measure_policy,
    print_comparison,
)
from lit_rlhf.tools.evaluation.figures import LiveCurves, outcome_figure, run_figure, save_figure
from lit_rlhf.tools.evaluation.loading import (
    choose_device,
    load_encoder,
    load_policy,
    load_reward,
    load_shared_encoder,
    short_names,
)
from lit_rlhf.tools.evaluation.outcomes import (
    HeadToHead,
    Outcomes,
    ScoreSummary,
    outcome_rates,
    outcomes_table,
    score_summary,
)
from lit_rlhf.tools.evaluation.output import (
    NOTE_STYLE,
    print_table,
    print_text,
    progress_bar,
)
from lit_rlhf.tools.evaluation.responses import Responses, SampledResponse, read_responses
from lit_rlhf.tools.evaluation.sampling import (
    EncodedPrompts,
    Generation,
    SampledBatch,
    batch_by_length,
    encode_prompt_records,
    generate_from_models,
    hash_prompts,
    model_files,
    print_generation,
    read_prompts,
    sample_batches,
)

__all__ = [
    "NOTE_STYLE",
    "Comparison",
    "EncodedPrompts",
    "Generation",
    "HeadToHead",
    "LiveCurves",
    "Outcomes",
    "PolicyReport",
    "PolicySamples",
    "Responses",
    "SampledBatch",
    "SampledResponse",
    "ScoreSummary",
    "batch_by_length",
    "choose_device",
    "compare_policies",
    "comparison_table",
    "encode_prompt_records",
    "generate_from_models",
    "hash_prompts",
    "load_encoder",
    "load_policy",
    "load_reward",
    "load_shared_encoder",
    "measure_policy",
    "model_files",
    "outcome_figure",
    "outcome_rates",
    "outcomes_table",
    "print_comparison",
    "print_generation",
    "print_table",
    "print_text",
    "progress_bar",
    "read_prompts",
    "read_responses",
    "run_figure",
    "sample_batches",
    "save_figure",
    "score_summary",
    "short_names",
]
