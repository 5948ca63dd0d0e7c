"""Checks that the networks speak of the same tokens and the same text."""

from __future__ import annotations

import warnings
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import TextContract
from lit_rlhf.doctor.case import Case
from lit_rlhf.doctor.findings import Finding, failure, ok, warning
from lit_rlhf.forward import unwrap_model
from lit_rlhf.models import load_tokenizer

SPECIAL = ("eos_token", "bos_token")


def vocabularies(case: Case) -> Finding:
    """Embeddings that hold all tokens, and special tokens that mean the same to all."""
    tokenizer = tokenizer_of(case)
    rows = {
        name: len(unwrap_model(network).get_input_embeddings().weight)  # type: ignore[arg-type]
        for name, network in case.networks().items()
    }
    head = unwrap_model(case.module.policy).get_output_embeddings()  # type: ignore[no-untyped-call]
    largest, emitted = max(tokenizer.get_vocab().values()), len(head.weight) - 1
    for name, count in rows.items():
        if count <= largest:
            return failure(
                f"The tokenizer has ids up to {largest}, the {name} embeds {count} tokens only.",
                f"Give the {name} an embedding for every token (resize_token_embeddings and some "
                "training), or use a model with this tokenizer.",
            )
        if count <= emitted:
            return failure(
                f"The policy can emit ids up to {emitted}, the {name} embeds {count} tokens only: "
                "the first such id ends the run.",
                f"Give policy and {name} embeddings of one size (resize_token_embeddings).",
            )
    if (differing := _other_special_tokens(case, tokenizer)) is not None:
        return differing
    sizes = ", ".join(str(count) for count in sorted(set(rows.values())))
    return ok(
        f"{len(tokenizer)} tokens, embeddings of {sizes} in all {len(rows)} networks; "
        f"EOS {tokenizer.eos_token!r}, padding {tokenizer.pad_token!r}."
    )


def tokenizer_of(case: Case) -> PreTrainedTokenizerBase:
    """The tokenizer that texts go through."""
    encoder = case.module.encoder
    return case.module.tokenizer if encoder is None else encoder.tokenizer


def _other_special_tokens(case: Case, tokenizer: PreTrainedTokenizerBase) -> Finding | None:
    for source in case.module.reward.models:
        try:
            other = load_tokenizer(source.path, source.trust_remote_code)
        except ValueError:  # it has no tokenizer, its contract must do
            continue
        for token in SPECIAL:
            mine, theirs = (
                (getattr(t, token), getattr(t, f"{token}_id")) for t in (tokenizer, other)
            )
            if mine != theirs:
                return failure(
                    f"{token} is {mine[0]!r} (id {mine[1]}) for the policy and {theirs[0]!r} "
                    f"(id {theirs[1]}) for the tokenizer of reward model {source.path!r}.",
                    f"Set {token} alike in the tokenizers of model.model_path and of the reward "
                    "model, as both were trained with it.",
                )
    return None


def text_contract(case: Case) -> Finding:
    """Reward models, and the policy's own training, that read text as this run writes it."""
    module = case.module
    if module.encoder is None:
        return warning(
            "The datamodule has no encoder, so what the policy writes is not known.",
            "Use lit_rlhf.data.PromptDataModule, or compare the chat templates yourself.",
        )
    contract = module.encoder.contract
    unknown = []
    for source in module.reward.models:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                source.check_contract(contract)
            except ValueError as error:
                return failure(
                    str(error),
                    "Set data.chat_template to the template that the reward model was trained "
                    "with, or train one (model.rewards) with the policy's.",
                )
        unknown += [str(entry.message) for entry in caught]
    if unknown:
        return warning(unknown[0], "Train the reward model with lit_rlhf, or compare by hand.")
    own = Path(module.model_path)
    saved = TextContract.find(own)
    mismatch = None if saved is None else saved.mismatch(contract)
    if mismatch is not None:
        return warning(
            f"The policy in {str(own)!r} was trained on other text than this run's: {mismatch}",
            "Set data.chat_template as it was in SFT.",
        )
    count = len(module.reward.models)
    readers = f"{count} reward model{'s' * (count != 1)}" if count else "No reward model, functions"
    return ok(f"{readers} and the policy read text alike: it ends {contract.render()[-24:]!r}.")
