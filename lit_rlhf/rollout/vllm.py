"""vLLM as PPO's sampler: in the process of each rank, or a server in an environment of its own.

Both take over the policy's weights at every call, with LoRA adapters merged, and return the
log-probs of the distribution that they drew from. `docs/sampler.md` says how to install and start
them.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.nn.utils.rnn import pad_sequence

from lit_rlhf.checks import check_positive
from lit_rlhf.forward import LanguageModel, is_sharded, unwrap_model
from lit_rlhf.models import merged_state_dict
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.generation import check_prompts
from lit_rlhf.rollout.sampling import SamplingOptions
from lit_rlhf.stats import fail_together

PARALLEL_REQUESTS = 64


Completion = tuple[Sequence[int], Sequence[float]]
"""The tokens of a response, and their log-probs in nats; both as far as its first EOS token."""


class VLLMSampler:
    """Samples with vLLM in the process of each rank, on the device of its policy.

    The engine is built at the first call, from the policy's folder. On a GPU it frees its memory
    between calls.

    Args:
        engine: Further arguments of `vllm.LLM`, such as `gpu_memory_utilization`.
    """

    def __init__(self, engine: Mapping[str, Any] = {}) -> None:
        self.engine = dict(engine)
        self._llm: Any = None

    def __call__(
        self,
        model: LanguageModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        options: SamplingOptions,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        seed: int,
        batch_size: int | None = None,
    ) -> RolloutBatch:
        """Sample as `Sampler` describes; `engine.max_num_seqs` takes the place of `batch_size`."""
        prompts = _read_prompts(model, prompt_ids, prompt_mask, options)
        from vllm import SamplingParams  # not installed with lit_rlhf

        if self._llm is None:
            self._llm = self._build_engine(model)
        sleeps = self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode
        if sleeps:
            self._llm.wake_up(tags=["weights"])
        self.hand_over(model)
        if sleeps:
            self._llm.wake_up(tags=["kv_cache"])
        self._llm.reset_prefix_cache()  # of the weights before
        settings = sampling_settings(options, eos_token_ids)
        asked = [
            SamplingParams(**settings, seed=row_seed, detokenize=False)
            for row_seed in _row_seeds(seed, len(prompts))
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        completions = []
        for request in self._llm.generate(inputs, asked, use_tqdm=False):
            ids, at = request.outputs[0].token_ids, request.outputs[0].logprobs
            drawn = [of[token].logprob for token, of in zip(ids, at, strict=True)]
            completions.append((ids, drawn))
        if sleeps:
            self._llm.sleep(level=2)  # the weights are handed over again before the next
        return _to_rollouts(
            prompt_ids, prompt_mask, completions, options, eos_token_ids, pad_token_id
        )

    def hand_over(self, model: LanguageModel) -> None:
        """Give vLLM the weights of the policy."""
        # by the names in the state dict, as both names of tied weights have to be handed over
        weights = merged_state_dict(model).items()
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def _build_engine(self, model: LanguageModel) -> Any:  # noqa: ANN401  # vLLM has no stubs here
        from vllm import LLM

        policy = unwrap_model(model)
        on_gpu = policy.device.type == "cuda"
        settings = {
            "model": policy.config.name_or_path,
            "load_format": "dummy",  # the weights are handed over
            "dtype": str(policy.dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            # of the distribution that tokens are drawn from: after temperature, top-p and the like
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": on_gpu,
            "seed": 0,
        }
        if on_gpu:  # a process of vLLM's own would see every GPU but know no rank
            settings["distributed_executor_backend"] = "external_launcher"
        return LLM(**settings | self.engine)


class VLLMServerSampler:
    """Samples with a vLLM server, for the prompts of all ranks.

    The server may have an environment of its own. Rank 0 writes the weights to a folder that the
    server reads.

    Args:
        url: Address of the server, such as `http://127.0.0.1:8000`.
        weights_dir: Folder for a file of weights, best in memory; each call replaces the file.
        timeout: Seconds that an answer may take.
    """

    def __init__(self, url: str, weights_dir: str, timeout: float = 600.0) -> None:
        check_positive("timeout", timeout)
        self.url = url.rstrip("/")
        self.weights_dir = Path(weights_dir).resolve()
        self.timeout = timeout

    def __call__(
        self,
        model: LanguageModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        options: SamplingOptions,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        seed: int,
        batch_size: int | None = None,
    ) -> RolloutBatch:
        """Sample as `Sampler` describes; the server decides how many responses are in progress."""
        prompts = _read_prompts(model, prompt_ids, prompt_mask, options)
        with httpx2.Client(timeout=self.timeout) as client:
            with fail_together("hand the weights over to vLLM"):
                if not distributed.is_initialized() or distributed.get_rank() == 0:
                    self.hand_over(client, model)
            settings = sampling_settings(options, eos_token_ids)
            settings |= {"model": self._ask(client, "GET", "/v1/models")["data"][0]["id"]}
            settings |= {"return_token_ids": True}

            def ask(prompt: list[int], row_seed: int) -> Completion:
                body = settings | {"prompt": prompt, "seed": row_seed}
                choice = self._ask(client, "POST", "/v1/completions", body)["choices"][0]
                return choice["token_ids"], choice["logprobs"]["token_logprobs"]

            with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
                completions = list(pool.map(ask, prompts, _row_seeds(seed, len(prompts))))
        return _to_rollouts(
            prompt_ids, prompt_mask, completions, options, eos_token_ids, pad_token_id
        )

    def hand_over(self, client: httpx2.Client, model: LanguageModel) -> None:
        """Write the weights of the policy, and have the server read them."""
        weights = merged_state_dict(model)
        # both names of tied weights have to be handed over, and a file holds no tensor twice
        for name in getattr(unwrap_model(model), "all_tied_weights_keys", {}):
            weights[name] = weights[name].clone()
        self.weights_dir.mkdir(parents=True, exist_ok=True)
        save_file(weights, self.weights_dir / "model.safetensors")
        arguments = {"weights_path": str(self.weights_dir)}
        body = {"method": "reload_weights", "kwargs": arguments, "timeout": self.timeout}
        self._ask(client, "POST", "/collective_rpc", body)
        self._ask(client, "POST", "/reset_prefix_cache")

    def _ask(
        self, client: httpx2.Client, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Any:  # noqa: ANN401  # JSON
        try:
            answer = client.request(method, self.url + path, json=body)
            answer.raise_for_status()
            return answer.json() if answer.content else None
        except (httpx2.HTTPError, ValueError) as error:
            text = error.response.text[:200] if isinstance(error, httpx2.HTTPStatusError) else ""
            raise RuntimeError(
                f"sampler: expected a vLLM server, started as in docs/sampler.md, at {self.url}, "
                f"got {error or type(error).__name__} {text}".rstrip()
            ) from error


def sampling_settings(options: SamplingOptions, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """The options by the names that `vllm.SamplingParams` and vLLM's server have for them."""
    return {
        "max_tokens": options.max_new_tokens,
        "min_tokens": options.min_new_tokens,
        "temperature": options.temperature if options.do_sample else 0.0,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "repetition_penalty": options.repetition_penalty,
        "stop_token_ids": list(eos_token_ids),
        "ignore_eos": True,  # that of the model's folder
        "logprobs": 0,  # of the token that was drawn, and of no other
    }


def _read_prompts(
    model: LanguageModel, prompt_ids: Tensor, prompt_mask: Tensor, options: SamplingOptions
) -> list[list[int]]:
    """The tokens of the prompts, without padding."""
    if is_sharded(model):
        raise ValueError(
            "sampler: expected a strategy that keeps the whole policy on each rank, such as ddp, "
            "got a sharded policy: vLLM takes over whole weights"
        )
    check_prompts(unwrap_model(model), prompt_ids, prompt_mask, options)
    return [ids[mask].tolist() for ids, mask in zip(prompt_ids, prompt_mask, strict=True)]


def _row_seeds(seed: int, n: int) -> list[int]:
    """A seed for each response; with one for all, equal prompts would have equal responses."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**31, (n,), generator=generator).tolist()


def _to_rollouts(
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completions: Sequence[Completion],
    options: SamplingOptions,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
) -> RolloutBatch:
    """Rollouts of completions, each of which ends by an EOS token or has the greatest length."""
    longest, device = options.max_new_tokens, prompt_ids.device
    terminated = []
    for ids, logprobs in completions:
        terminated.append(bool(ids) and ids[-1] in eos_token_ids)
        if len(ids) != len(logprobs) or not (terminated[-1] or len(ids) == longest):
            raise RuntimeError(
                "sampler: expected responses that end by one of the EOS tokens "
                f"{list(eos_token_ids)} or have {longest} tokens, with as many log-probs, got "
                f"{len(logprobs)} log-probs of the tokens {list(ids)}"
            )
    tokens, drawn = (
        [torch.tensor(of, device=device) for of in column]
        for column in zip(*completions, strict=True)
    )
    lengths = torch.tensor([len(ids) for ids in tokens], device=device)
    return RolloutBatch(
        prompt_ids,
        prompt_mask,
        pad_sequence(tokens, batch_first=True, padding_value=pad_token_id),
        torch.arange(int(lengths.max()), device=device) < lengths[:, None],
        torch.tensor(terminated, device=device),
        sampler_logprobs=pad_sequence(drawn, batch_first=True) if options.do_sample else None,
    )
