"""The options that `lit_rlhf evaluate` and `lit_rlhf generate` share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_rlhf.choices import DType, OnBadRecord

if TYPE_CHECKING:  # they import torch, for which --help does not wait
    from lit_rlhf.data import DataSource
    from lit_rlhf.models import ModelOptions
    from lit_rlhf.rollout import SamplingOptions


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
        trust_remote_code: Run code that comes with a model. Leave off unless you have read it.
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
