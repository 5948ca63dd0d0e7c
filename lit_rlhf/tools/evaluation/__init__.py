"""Programs that look at trained models, each with one entrance.

- `compare_policies` (`lit_rlhf evaluate`) samples from policies on the same prompts and says who
  wins by each reward; `generate_from_models` (`lit_rlhf generate`) only samples.
- `judge.judge_policies` (`--judge.model`) lets a language model compare the responses.
- `benchmarks.run_benchmarks` (`--benchmarks`, `--choices`) measures what alignment costs.
- `reward_report.score_pairs` and `measure_reward_model` (`lit_rlhf report reward`) measure a reward
  model on preferences.
- `chat.Chat` (`lit_rlhf generate --chat`) talks with models in the terminal.

They share `loading`, `sampling`, `responses`, `outcomes` (rates with intervals), `charts`
(`lit_rlhf plot`) and `output`.
"""

from lit_rlhf.tools.evaluation.charts import (
    LiveCurves,
    kl_figure,
    outcome_figure,
    run_figure,
    save_figure,
)
from lit_rlhf.tools.evaluation.compare import Comparison, compare_policies, print_comparison
from lit_rlhf.tools.evaluation.loading import choose_device, load_policy, load_shared_encoder
from lit_rlhf.tools.evaluation.outcomes import HeadToHead
from lit_rlhf.tools.evaluation.output import NOTE_STYLE, print_text, progress_bar
from lit_rlhf.tools.evaluation.responses import Responses, read_responses
from lit_rlhf.tools.evaluation.sampling import (
    Generation,
    SampledBatch,
    encode_prompt_records,
    generate_from_models,
    hash_models,
    hash_prompts,
    print_generation,
    read_prompts,
    sample_batches,
)

__all__ = [
    "NOTE_STYLE",
    "Comparison",
    "Generation",
    "HeadToHead",
    "LiveCurves",
    "Responses",
    "SampledBatch",
    "choose_device",
    "compare_policies",
    "encode_prompt_records",
    "generate_from_models",
    "hash_models",
    "hash_prompts",
    "kl_figure",
    "load_policy",
    "load_shared_encoder",
    "outcome_figure",
    "print_comparison",
    "print_generation",
    "print_text",
    "progress_bar",
    "read_prompts",
    "read_responses",
    "run_figure",
    "sample_batches",
    "save_figure",
]
