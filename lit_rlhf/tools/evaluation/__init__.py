"""Programs that look at trained models, each with one entrance.

- `lit_rlhf evaluate`: `compare_policies`, `judge.judge_policies`, `benchmarks.run_benchmarks`;
- `lit_rlhf generate`: `generate_from_models`, `chat.Chat`;
- `lit_rlhf report reward`: `reward_report.score_pairs`, `measure_reward_model`;
- `lit_rlhf reward probe`: `reward_probe.load_probe`, `probe_reward`.

`LiveCurves` is a callback for notebooks. It is imported when it is asked for: only it needs
Lightning, whose import takes a second.
"""

from typing import TYPE_CHECKING, Any

from lit_callbacks.charts import run_figure as run_figure
from lit_rlhf.tools.evaluation.compare import Comparison as Comparison
from lit_rlhf.tools.evaluation.compare import compare_policies as compare_policies
from lit_rlhf.tools.evaluation.compare import print_comparison as print_comparison
from lit_rlhf.tools.evaluation.figures import kl_figure as kl_figure
from lit_rlhf.tools.evaluation.figures import outcome_figure as outcome_figure
from lit_rlhf.tools.evaluation.figures import save_figure as save_figure
from lit_rlhf.tools.evaluation.responses import Responses as Responses
from lit_rlhf.tools.evaluation.responses import read_responses as read_responses
from lit_rlhf.tools.evaluation.sampling import Generation as Generation
from lit_rlhf.tools.evaluation.sampling import generate_from_models as generate_from_models
from lit_rlhf.tools.evaluation.sampling import print_generation as print_generation
from lit_rlhf.tools.evaluation.sampling import read_prompts as read_prompts

if TYPE_CHECKING:
    from lit_rlhf.tools.evaluation.live_curves import LiveCurves as LiveCurves


def __getattr__(name: str) -> Any:  # noqa: ANN401  # the protocol of modules
    if name == "LiveCurves":
        from lit_rlhf.tools.evaluation.live_curves import LiveCurves

        return LiveCurves
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
