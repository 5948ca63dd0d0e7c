"""The options that `lit_rlhf evaluate`, `generate` and `label` share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_rlhf.choices import DType, OnBadRecord

if TYPE_CHECKING:  # they import torch, for which --help does not wait
    from lit_rlhf.data import DataSource, PromptRecord
    from lit_rlhf.models import ModelOptions
    from lit_rlhf.rollout import SamplingOptions
    from lit_rlhf.tools.evaluation import Generation


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Options of sampling responses to prompts.

    Attributes:
        prompts: File of prompts (.jsonl, .json, .parquet, .jsonl.gz) or id of a dataset on the hub.
            Of preferences and demonstrations the prompts are taken.
        max_new_tokens: Longest response in tokens, including EOS; longer ones are cut off.
        temperature: Sampling temperature. Default: the paper's.
        top_p: Sample from the smallest set of tokens with this probability; 1 turns it off.
            Default: the paper's.
        min_p: Sample from the tokens that are at least this share as probable as the most probable
            one; 0 turns it off.
        repetition_penalty: Penalty on tokens that occurred before, in the prompt too; 1 turns it
            off. Default: the paper's.
        split: Split of a dataset on the hub, for example test or test[:200]; not used for files.
        max_prompts: Use only this many prompts, from the first. Default: all.
        on_bad_record: What to do about a record without a usable prompt: error names its file and
            line and ends the command, skip leaves it out and logs how many there are.
        chat_template: tokenizer for the template in the models' folders, or hh, paper-en, paper-zh.
        batch_size: Prompts per batch. The samples depend on it.
        device: auto, cpu, cuda, cuda:1 and so on.
        dtype: Type of all weights: float32, bfloat16 or float16.
        trust_remote_code: Run code that comes with a model. Leave it off unless you have read it.
    """

    prompts: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 0.9
    min_p: float = 0.0
    repetition_penalty: float = 1.1
    split: str = "test"
    max_prompts: int | None = None
    on_bad_record: OnBadRecord = "error"
    chat_template: str = "tokenizer"
    batch_size: int = 32
    device: str = "auto"
    dtype: DType = "float32"
    trust_remote_code: bool = False

    @property
    def sampling(self) -> "SamplingOptions":
        """How responses are sampled."""
        from lit_rlhf.rollout import SamplingOptions

        return SamplingOptions(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )

    @property
    def model_options(self) -> "ModelOptions":
        """How models are loaded."""
        from lit_rlhf.models import ModelOptions

        return ModelOptions(dtype=self.dtype, trust_remote_code=self.trust_remote_code)

    @property
    def source(self) -> "DataSource | None":
        """Where the prompts come from; `None` if they are not in a file or dataset."""
        from lit_rlhf.data import DataSource

        return None if self.prompts is None else DataSource(self.prompts, split=self.split)

    def sample_responses(
        self,
        models: Sequence[str],
        prompts: "Sequence[PromptRecord]",
        *,
        responses_per_prompt: int,
        seed: int,
        output: str | Path | None,
        max_prompt_length: int | None = None,
    ) -> "Generation":
        """Sample responses of models with these options, see `generate_from_models`.

        Args:
            models: Folders or hub ids.
            prompts: The prompts, at least one.
            responses_per_prompt: Number of responses of each model to each prompt.
            seed: Seed of the sampling, the same for every model.
            output: JSON lines file for all responses; `None` for no file.
            max_prompt_length: Longest prompt in tokens; `None` for the model's.
        """
        from lit_rlhf.tools.evaluation import generate_from_models
        from lit_rlhf.tools.evaluation.loading import choose_device

        return generate_from_models(
            models,
            prompts,
            sampling=self.sampling,
            model_options=self.model_options,
            device=choose_device(self.device),
            batch_size=self.batch_size,
            responses_per_prompt=responses_per_prompt,
            chat_template=self.chat_template,
            max_prompt_length=max_prompt_length,
            seed=seed,
            output=output,
            on_bad_record=self.on_bad_record,
        )
