"""vLLM as PPO's sampler: in the process of each rank, or a server in an environment of its own.

Both take over the policy's weights at every call, with LoRA adapters merged, and return the
log-probs of the distribution that they drew from. `docs/sampler.md` says how to install and start
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.nn.utils.rnn import pad_sequence

from lit_rlhf.checks import check_positive
from lit_rlhf.errors import UserError
from lit_rlhf.forward import (
    LanguageModel,
    ids_without_token,
    is_sharded,
    longest_sequence,
    unwrap_model,
)
from lit_rlhf.models import has_adapted_ties, merged_state_dict
from lit_rlhf.remote import Answer, RemoteClient, RemoteError
from lit_rlhf.rollout.batch import RolloutBatch
from lit_rlhf.rollout.generation import Sampler, check_prompts
from lit_rlhf.rollout.sampling import SamplingOptions
from lit_rlhf.stats import fail_together
from lit_rlhf.urls import ServiceUrl

PARALLEL_REQUESTS = 64
LOWEST_LOGIT_BIAS = -100.0
"""The lowest that vLLM takes: a probability of e^-100 at equal logits."""


class Completion(NamedTuple):
    """A response of vLLM.

    Attributes:
        token_ids: Tokens up to an EOS token, which is included.
        logprobs: Their log-probs in the distribution that they were drawn from, nats.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class _VLLM(Sampler, ABC):
    """Samples with vLLM, which decides how many responses are in progress."""

    def __call__(
        self,
        model: LanguageModel,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        options: SamplingOptions,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        seed: int,
        batch_size: int | None = None,
    ) -> RolloutBatch:
        """Sample as `Sampler` describes, without regard to `batch_size`."""
        if is_sharded(model):
            raise ValueError(
                "sampler: expected a strategy that keeps the whole policy on each rank, such as "
                "ddp, got a sharded policy: vLLM takes over whole weights"
            )
        check_prompts(unwrap_model(model), prompt_ids, prompt_mask, options)
        prompts = [ids[mask].tolist() for ids, mask in zip(prompt_ids, prompt_mask, strict=True)]
        settings = {
            "max_tokens": options.max_new_tokens,
            "min_tokens": options.min_new_tokens,
            "temperature": options.temperature if options.do_sample else 0.0,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "min_p": options.min_p,
            "repetition_penalty": options.repetition_penalty,
            "stop_token_ids": list(eos_token_ids),
            "ignore_eos": True,  # the EOS token of the model's folder
            "logprobs": 0,  # for the token that was drawn only
        }
        if (ruled_out := ids_without_token(model)) is not None:
            # a list of all other ids would be sent with every prompt; JSON has no infinity
            settings["logit_bias"] = dict.fromkeys(ruled_out.tolist(), LOWEST_LOGIT_BIAS)
        # a seed for each response: equal prompts would have equal responses
        generator = torch.Generator().manual_seed(seed)
        seeds = torch.randint(2**31, (len(prompts),), generator=generator).tolist()
        completions = self._complete(model, prompts, [settings | {"seed": s} for s in seeds])
        with fail_together("sample whole responses with vLLM"):
            terminated = [
                _ends_with_eos(completion, eos_token_ids, options.max_new_tokens)
                for completion in completions
            ]
        device = prompt_ids.device
        tokens = [torch.tensor(completion.token_ids, device=device) for completion in completions]
        sampler_logprobs = None
        if options.do_sample:
            rows = [torch.tensor(completion.logprobs, device=device) for completion in completions]
            sampler_logprobs = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(ids) for ids in tokens], device=device)
        return RolloutBatch(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            response_ids=pad_sequence(tokens, batch_first=True, padding_value=pad_token_id),
            response_mask=torch.arange(int(lengths.max()), device=device) < lengths[:, None],
            terminated=torch.tensor(terminated, device=device),
            sampler_logprobs=sampler_logprobs,
        )

    @abstractmethod
    def _complete(
        self, model: LanguageModel, prompts: list[list[int]], settings: list[dict[str, Any]]
    ) -> list[Completion]:
        """Hand the weights over, and sample by the settings of each prompt.

        Args:
            model: The policy.
            prompts: Token ids of each prompt.
            settings: Sampling parameters of each prompt, by vLLM's names.
        """


def _ends_with_eos(completion: Completion, eos_token_ids: Sequence[int], longest: int) -> bool:
    """Whether a response ends by an EOS token; one that is not whole is an error.

    Args:
        completion: The response.
        eos_token_ids: The EOS tokens.
        longest: Most tokens of a response.
    """
    ids = completion.token_ids
    ended = bool(ids) and ids[-1] in eos_token_ids
    is_whole = ended or len(ids) == longest
    if not is_whole or len(ids) != len(completion.logprobs):
        raise UserError(
            f"sampler: expected responses that end by one of the EOS tokens {list(eos_token_ids)} "
            f"or have {longest} tokens, with as many log-probs, got {len(completion.logprobs)} "
            f"log-probs of the tokens {list(ids)}"
        )
    return ended


class VLLMSampler(_VLLM):
    """Samples with vLLM in the process of each rank, on the device of its policy.

    The engine is built at the first call, from the policy's folder. On a GPU it frees its memory
    between calls.

    Args:
        engine: Further arguments of `vllm.LLM`, such as `gpu_memory_utilization`.
    """

    def __init__(self, engine: Mapping[str, Any] = {}) -> None:
        self.engine = dict(engine)
        self._llm: Any = None

    def _complete(
        self, model: LanguageModel, prompts: list[list[int]], settings: list[dict[str, Any]]
    ) -> list[Completion]:
        """Hand the weights over, and sample; see the base class."""
        from vllm import SamplingParams  # not installed with lit_rlhf

        llm = self._llm = self._llm or self._build_engine(model)
        sleeps = llm.llm_engine.vllm_config.model_config.enable_sleep_mode
        if sleeps:
            llm.wake_up(tags=["weights"])
        self.hand_over(model)
        if sleeps:
            llm.wake_up(tags=["kv_cache"])
        llm.reset_prefix_cache()  # it is from the weights before
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        parameters = [SamplingParams(**values, detokenize=False) for values in settings]
        completions = []
        for request in llm.generate(inputs, parameters, use_tqdm=False):
            output = request.outputs[0]
            logprobs = [
                by_token[token].logprob
                for token, by_token in zip(output.token_ids, output.logprobs, strict=True)
            ]
            completions.append(Completion(output.token_ids, logprobs))
        if sleeps:
            llm.sleep(level=2)  # the weights are handed over again before the next
        return completions

    def hand_over(self, model: LanguageModel) -> None:
        """Give vLLM the weights of the policy."""
        # by the names in the state dict: both names of tied weights have to be handed over
        weights = merged_state_dict(model).items()
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def _build_engine(self, model: LanguageModel) -> Any:  # noqa: ANN401  # vLLM has no stubs here
        from vllm import LLM

        policy = unwrap_model(model)
        on_gpu = policy.device.type == "cuda"
        settings: dict[str, Any] = {
            "model": policy.config.name_or_path,
            "load_format": "dummy",  # the weights are handed over
            "dtype": str(policy.dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            # log-probs after temperature, top-p and the like
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": on_gpu,
            "seed": 0,
        }
        if has_adapted_ties(policy):
            # the folder's embedding is the output layer, too; here they are two weights
            settings["hf_overrides"] = {"tie_word_embeddings": False}
        if (longest := longest_sequence(policy)) is not None:
            # vLLM chooses the factors of longrope by it
            settings["max_model_len"] = longest
        if on_gpu:  # a process of vLLM's own would see every GPU but know no rank
            settings["distributed_executor_backend"] = "external_launcher"
        return LLM(**settings | self.engine)


class VLLMServerSampler(_VLLM):
    """Samples with a vLLM server, for the prompts of all ranks.

    The server may run in its own environment. Rank 0 writes the weights to a folder that it reads.
    If the server fails on one rank, the run ends on all of them; a request is not repeated.

    Args:
        url: Address of the server, such as `http://127.0.0.1:8000`; for secrets see `ServiceUrl`.
        weights_dir: Folder for a file of weights, best in memory; each call replaces the file.
        timeout: Seconds that an answer may take, from connecting to its end.
    """

    def __init__(self, url: str, weights_dir: str, timeout: float = 600.0) -> None:
        check_positive("timeout", timeout)
        self.weights_dir = Path(weights_dir).resolve()
        self.url = ServiceUrl(url)
        self.timeout = timeout

    def _complete(
        self, model: LanguageModel, prompts: list[list[int]], settings: list[dict[str, Any]]
    ) -> list[Completion]:
        """Hand the weights over, and sample; see the base class."""
        with fail_together("hand the weights over to vLLM"):
            if not distributed.is_initialized() or distributed.get_rank() == 0:
                self.hand_over(model)
        with fail_together("sample with vLLM"), self._open() as client:
            try:
                name = _read_model_name(client)
                n_tokens = unwrap_model(model).config.get_text_config().vocab_size
                ask = partial(_ask_for_response, client, name, n_tokens)
                with ThreadPoolExecutor(PARALLEL_REQUESTS) as pool:
                    return list(pool.map(ask, prompts, settings))
            except RemoteError as error:
                raise _no_server(error) from error

    def hand_over(self, model: LanguageModel) -> None:
        """Write the weights of the policy, and have the server read them."""
        if has_adapted_ties(unwrap_model(model)):
            raise ValueError(
                "sampler: expected a policy without adapters on embeddings that are the output "
                "layer, too, got one with such adapters: the server has one weight for both; "
                "change network.lora_targets, or sample with VLLMSampler or lit_rlhf itself"
            )
        weights = merged_state_dict(model)
        # both names of tied weights have to be handed over, and a file holds no tensor twice
        for name in getattr(unwrap_model(model), "all_tied_weights_keys", {}):
            weights[name] = weights[name].clone()
        self.weights_dir.mkdir(parents=True, exist_ok=True)
        save_file(weights, self.weights_dir / "model.safetensors")
        arguments = {"weights_path": str(self.weights_dir)}
        with self._open() as client:
            try:
                client.post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
                client.post("/reset_prefix_cache")
            except RemoteError as error:
                raise _no_server(error) from error

    def _open(self) -> RemoteClient:
        """Open a client for one call: a module may be sent to processes."""
        return RemoteClient(self.url, timeout=self.timeout)


def _no_server(error: RemoteError) -> UserError:
    return UserError(f"sampler: expected a vLLM server, started as in docs/sampler.md, at {error}")


def _read_model_name(client: RemoteClient) -> str:
    """Ask which model is served."""
    answer = client.get("/v1/models")
    try:
        name = answer.parse()["data"][0]["id"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise client.fail('{"data": [{"id": NAME}]}', answer)
    return name


def _ask_for_response(
    client: RemoteClient,
    name: str,
    n_tokens: int,
    prompt: list[int],
    settings: Mapping[str, Any],
) -> Completion:
    """Ask for the response to one prompt.

    Args:
        client: Client of the server.
        name: Name of the model there.
        n_tokens: Size of the policy's vocabulary.
        prompt: Token ids of the prompt.
        settings: Sampling parameters by vLLM's names.
    """
    body = {"model": name, "prompt": prompt, "return_token_ids": True, **settings}
    answer = client.post("/v1/completions", body)
    completion = _read_completion(answer, n_tokens)
    if completion is None:
        raise client.fail(
            f"token_ids from 0 to {n_tokens - 1} with as many finite token_logprobs", answer
        )
    return completion


def _read_completion(answer: Answer, n_tokens: int) -> Completion | None:
    """Read a response; `None` if the answer has another form."""
    try:
        choice = answer.parse()["choices"][0]
        ids = choice["token_ids"]
        logprobs = choice["logprobs"]["token_logprobs"]
        # by type: true and false are integers to `isinstance`
        is_valid = all(type(token) is int and 0 <= token < n_tokens for token in ids) and all(
            type(logprob) in (int, float) and isfinite(logprob) for logprob in logprobs
        )
    except (LookupError, TypeError, OverflowError):
        return None
    return Completion(ids, logprobs) if is_valid else None
