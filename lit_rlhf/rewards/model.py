"""A reward model as a reward.

Notation: `B` responses.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import (
    CONTRACT_FILE,
    DialogueEncoder,
    Message,
    TextContract,
    Turns,
    pad_sequences,
    tokenizer_hash,
)
from lit_rlhf.forward import (
    LanguageModel,
    Offloaded,
    count_heads,
    freeze,
    on_device,
    optimize_forward,
    scalar_head_of,
    sequence_scores,
    set_longest_sequence,
    unwrap_model,
)
from lit_rlhf.models import ModelOptions, load_scalar_model, load_tokenizer
from lit_rlhf.rank_zero import rank_zero_info, rank_zero_warn
from lit_rlhf.rollout import RolloutBatch, default_tokens_per_forward, split_by_tokens


class ResponseEncoder:
    """Encodes prompts and responses for a reward model that has another tokenizer than the policy.

    The policy's responses are decoded, rendered with their prompts by the reward model's own chat
    template, and tokenized by its own tokenizer.

    Args:
        tokenizer: The reward model's tokenizer, with a chat template.
        max_length: Longest dialogue in tokens. A longer one loses its oldest turns. `None`: no
            limit.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> None:
        self._encoder = DialogueEncoder(tokenizer, max_length=max_length or sys.maxsize)
        self.pad_token_id = self._encoder.pad_token_id

    def encode(
        self, dialogues: Sequence[Turns], responses: Sequence[str], terminated: Sequence[bool]
    ) -> list[Tensor]:
        """Encode prompts with their responses.

        Control tokens of the reward model are ordinary text to the policy. They are removed, or a
        response could write its own turn.

        Args:
            dialogues: Turns of each prompt.
            responses: A response to each prompt.
            terminated: Whether each response ended; one that did not gets no EOS.

        Returns:
            Token ids of each dialogue, `(L,)` int32.
        """
        encoded = []
        for turns, response, ended in zip(dialogues, responses, terminated, strict=True):
            messages = [Message(turn["role"], self._clean(turn["content"])) for turn in turns]
            messages.append(Message("assistant", self._clean(response).strip()))
            ids = self._encoder.encode_dialogue(messages).input_ids
            encoded.append(ids if ended else ids[:-1])
        return encoded

    def _clean(self, text: str) -> str:
        # again, since what is left may be control text in turn
        while self._encoder.control_text.search(text):
            text = self._encoder.control_text.sub("", text)
        return text


class ModelReward(nn.Module):
    """Scores from a frozen reward model, which reads the token ids of the rollouts or text.

    A model of `K` heads (`n_heads`) gives the scores of each.

    Args:
        path: Folder or hub id, or the name of a `loaded` model.
        options: How the model is loaded. LoRA and gradient checkpointing are ignored.
        offload: Whether the weights are in CPU memory between uses.
        loaded: The model, if it is loaded already.
        shard: Whether each rank keeps a share of the weights between uses.
    """

    own_text: ResponseEncoder | None = None
    """Encodes text for a model that has another tokenizer than the policy."""

    model: LanguageModel | Offloaded

    def __init__(
        self,
        path: str,
        options: ModelOptions,
        *,
        offload: bool = False,
        loaded: LanguageModel | None = None,
        shard: bool = False,
    ) -> None:
        super().__init__()
        self.path = path
        self._is_object = loaded is not None
        self._in_4bit = options.load_in_4bit
        # the options are the policy's, whose adapters and checkpointing serve only training
        plain = replace(options, lora_rank=0, gradient_checkpointing=False)
        if loaded is None:
            model = load_scalar_model(path, plain, heads=None, role="reward model")
        else:
            scalar_head_of(loaded)  # refuses a model without one
            model = optimize_forward(loaded, role="reward model")
        model = freeze(model)
        config = unwrap_model(model).config
        self.n_heads = count_heads(config)
        self._positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.model = Offloaded(model, to_cpu=offload, shard=shard) if offload or shard else model
        self.trust_remote_code = options.trust_remote_code

    def set_longest_sequence(self, n_tokens: int) -> None:
        """Fix rotary factors that depend on the sequence for a run's longest, in tokens.

        Text for a model with another tokenizer may be as long as its positions.
        """
        network = self.model.network if isinstance(self.model, Offloaded) else self.model
        longest_own = 0 if self.own_text is None else self._positions or 0
        set_longest_sequence(network, max(longest_own, n_tokens))

    def find_base(self, options: ModelOptions) -> LanguageModel | None:
        """The model, if a network that is loaded with `options` can share its frozen weights.

        It can unless the model is on the device for its uses only, is of another type, or is a
        Python object, which may differ from the folder that it names.
        """
        if self._is_object or isinstance(self.model, Offloaded):
            return None
        own_options = (unwrap_model(self.model).dtype, self._in_4bit)
        return self.model if own_options == (options.torch_dtype, options.load_in_4bit) else None

    @torch.no_grad()
    def forward(
        self,
        rollouts: RolloutBatch,
        prompts: Sequence[str],
        max_tokens_per_forward: int | None = None,
        records: Sequence[Mapping[str, Any]] = (),
    ) -> Tensor:
        """Score rollouts at each response's last token.

        Args:
            rollouts: `B` responses, of which the model reads the token ids.
            prompts: Not used: the rollouts have the prompts' ids.
            max_tokens_per_forward: Most tokens in a forward, see `RolloutBatch.split`.
            records: Not used.

        Returns:
            Scores `[B]`, or `[B, K]` from `K` heads, float32.
        """
        with on_device(self.model, rollouts.response_ids.device) as model:
            return torch.cat(
                [
                    sequence_scores(model, part.sequence_ids, part.sequence_mask)
                    for part in rollouts.split(max_tokens_per_forward)
                ]
            )

    def choose_text(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Give the model text, see `score_text`, if its tokenizer is not the policy's.

        This needs a chat template in the tokenizer of its folder. Without one `check_contract`
        refuses the model.
        """
        saved = TextContract.find(self.path)
        if saved is not None and saved.tokenizer_hash == tokenizer_hash(tokenizer):
            return
        try:
            own_tokenizer = load_tokenizer(self.path, self.trust_remote_code)
        except ValueError:  # no tokenizer
            return
        if own_tokenizer.chat_template is None:
            return
        if tokenizer_hash(own_tokenizer) == tokenizer_hash(tokenizer):
            return
        self.own_text = ResponseEncoder(own_tokenizer, self._positions)
        rank_zero_info(
            f"reward model {self.path!r} has another tokenizer than the policy: responses are "
            "decoded, rendered by its own chat template, and scored"
        )

    @torch.no_grad()
    def score_text(
        self,
        turns: Sequence[Turns],
        responses: Sequence[str],
        terminated: Tensor,
        max_tokens_per_forward: int | None = None,
    ) -> Tensor:
        """Score responses as text, encoded by the model's own template and tokenizer.

        Args:
            turns: Turns of each prompt, `B` of them.
            responses: Decoded responses, `B` of them.
            terminated: Whether each response ended with EOS, `[B]` bool.
            max_tokens_per_forward: Most tokens in a forward; `None` for the device's default.

        Returns:
            Scores as from `forward`.
        """
        assert self.own_text is not None
        if len(turns) != len(responses):
            raise ValueError(
                f"turns: expected the turns of {len(responses)} prompts for reward model "
                f"{self.path!r}, which has another tokenizer than the policy, got {len(turns)}; "
                "use lit_rlhf.data.PromptDataModule"
            )
        device = terminated.device
        ids = self.own_text.encode(turns, responses, terminated.tolist())
        limit = max_tokens_per_forward or default_tokens_per_forward(device)
        scores = []
        with on_device(self.model, device) as model:
            for rows in split_by_tokens([len(row) for row in ids], limit):
                padded = pad_sequences(ids[rows], self.own_text.pad_token_id)
                scores.append(sequence_scores(model, *(part.to(device) for part in padded)))
        return torch.cat(scores)

    def check_contract(self, policy: TextContract) -> None:
        """Check that the model was trained on text rendered and tokenized like the policy's.

        A model that is given text passes. A model folder without a text contract has only its
        tokenizer to compare, and a warning says so.
        """
        if self.path.startswith("<"):
            rank_zero_warn(
                f"reward model {self.path} was not loaded from a folder: whether it reads what the "
                "policy writes cannot be checked",
            )
            return
        if self.own_text is not None:
            return
        saved = TextContract.find(self.path)
        mismatch = self._compare_tokenizer(policy) if saved is None else saved.mismatch(policy)
        if mismatch is not None:
            raise ValueError(
                f"reward model {self.path!r} does not read what the policy writes: {mismatch}"
            )
        if saved is None:
            rank_zero_warn(
                f"reward model {self.path!r} has no {CONTRACT_FILE}: its tokenizer is the "
                "policy's, but whether it was trained with the policy's chat template cannot be "
                f"checked. The policy writes {policy.render()!r}",
            )

    def _compare_tokenizer(self, policy: TextContract) -> str | None:
        """Say how the tokenizer of the model's folder differs from the policy's, if it does."""
        tokenizer = load_tokenizer(self.path, self.trust_remote_code)
        if tokenizer_hash(tokenizer) == policy.tokenizer_hash:
            return None
        return (
            f"it has another tokenizer, of {len(tokenizer)} tokens; the policy's has "
            f"{policy.vocab_size}. They differ in the vocabulary or split text differently, and "
            "only a tokenizer with a chat template of its own can render text for the model"
        )
