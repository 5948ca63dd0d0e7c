"""Rollouts of a policy: sampling responses, scoring their tokens, and the experience of PPO.

`generate_responses` samples a `RolloutBatch` of prompts and responses. `score_rollouts` computes
the `TokenStatistics` that an update needs: log-probs of policy and reference, entropies, values.
`Experience` is what the update reads, `RolloutMetrics` what is logged.
"""

from lit_rlhf.rollout.batch import Experience as Experience
from lit_rlhf.rollout.batch import RolloutBatch as RolloutBatch
from lit_rlhf.rollout.batch import check_minibatch_size as check_minibatch_size
from lit_rlhf.rollout.batch import default_tokens_per_forward as default_tokens_per_forward
from lit_rlhf.rollout.batch import iterate_minibatches as iterate_minibatches
from lit_rlhf.rollout.batch import split_by_tokens as split_by_tokens
from lit_rlhf.rollout.generation import Sampler as Sampler
from lit_rlhf.rollout.generation import generate_responses as generate_responses
from lit_rlhf.rollout.generation import generate_with_transformers as generate_with_transformers
from lit_rlhf.rollout.generation import seed_temporarily as seed_temporarily
from lit_rlhf.rollout.metrics import RolloutMetrics as RolloutMetrics
from lit_rlhf.rollout.samples import build_response_records as build_response_records
from lit_rlhf.rollout.samples import decode_responses as decode_responses
from lit_rlhf.rollout.samples import format_sample_table as format_sample_table
from lit_rlhf.rollout.sampling import SamplingOptions as SamplingOptions
from lit_rlhf.rollout.scoring import TokenStatistics as TokenStatistics
from lit_rlhf.rollout.scoring import compute_policy_statistics as compute_policy_statistics
from lit_rlhf.rollout.scoring import reference_model as reference_model
from lit_rlhf.rollout.scoring import score_rollouts as score_rollouts
from lit_rlhf.rollout.vllm import VLLMSampler as VLLMSampler
from lit_rlhf.rollout.vllm import VLLMServerSampler as VLLMServerSampler
