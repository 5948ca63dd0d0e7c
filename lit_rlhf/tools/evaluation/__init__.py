"""Programs that look at trained models, each with one entrance.

- `lit_rlhf evaluate`: `compare_policies`, `judge.judge_policies`, `benchmarks.run_benchmarks`;
- `lit_rlhf generate`: `generate_from_models`, `chat.Chat`;
- `lit_rlhf report reward`: `reward_report.score_pairs`, `measure_reward_model`.
"""

from lit_rlhf.tools.evaluation.charts import LiveCurves as LiveCurves
from lit_rlhf.tools.evaluation.charts import kl_figure as kl_figure
from lit_rlhf.tools.evaluation.charts import outcome_figure as outcome_figure
from lit_rlhf.tools.evaluation.charts import run_figure as run_figure
from lit_rlhf.tools.evaluation.charts import save_figure as save_figure
from lit_rlhf.tools.evaluation.compare import Comparison as Comparison
from lit_rlhf.tools.evaluation.compare import compare_policies as compare_policies
from lit_rlhf.tools.evaluation.compare import print_comparison as print_comparison
from lit_rlhf.tools.evaluation.loading import choose_device as choose_device
from lit_rlhf.tools.evaluation.loading import load_policy as load_policy
from lit_rlhf.tools.evaluation.loading import load_shared_encoder as load_shared_encoder
from lit_rlhf.tools.evaluation.output import NOTE_STYLE as NOTE_STYLE
from lit_rlhf.tools.evaluation.output import print_text as print_text
from lit_rlhf.tools.evaluation.output import progress_bar as progress_bar
from lit_rlhf.tools.evaluation.responses import Responses as Responses
from lit_rlhf.tools.evaluation.responses import read_responses as read_responses
from lit_rlhf.tools.evaluation.sampling import Generation as Generation
from lit_rlhf.tools.evaluation.sampling import count_shortened as count_shortened
from lit_rlhf.tools.evaluation.sampling import encode_prompt_records as encode_prompt_records
from lit_rlhf.tools.evaluation.sampling import generate_from_models as generate_from_models
from lit_rlhf.tools.evaluation.sampling import hash_models as hash_models
from lit_rlhf.tools.evaluation.sampling import hash_prompts as hash_prompts
from lit_rlhf.tools.evaluation.sampling import print_generation as print_generation
from lit_rlhf.tools.evaluation.sampling import read_prompts as read_prompts
from lit_rlhf.tools.evaluation.sampling import sample_batches as sample_batches
