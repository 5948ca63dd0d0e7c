"""Checks that all models agree on tokens and on how text is rendered."""

import warnings
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lit_rlhf.data import CONTRACT_FILE, TextContract
from lit_rlhf.forward import unwrap_model
from lit_rlhf.models import load_tokenizer
from lit_rlhf.tools.doctor.case import Case
from lit_rlhf.tools.doctor.report import Finding, failure, ok, warning


def check_vocabulary(case: Case) -> Finding:
    """Check that all models embed all tokens and have the same special tokens."""
    tokenizer = case.tokenizer
    given_text = {id(m.model) for m in case.module.reward.models if m.own_text is not None}
    rows = {
        name: len(unwrap_model(network).get_input_embeddings().weight)  # type: ignore[arg-type]
        for name, network in case.networks().items()
        if id(network) not in given_text
    }
    head = unwrap_model(case.module.policy).get_output_embeddings()  # type: ignore[no-untyped-call]
    # Output layers are often padded to a round size, so a policy can emit ids that no text has.
    largest = max(tokenizer.get_vocab().values())
    largest_emitted = len(head.weight) - 1
    for name, count in rows.items():
        if count <= largest:
            return failure(
                f"The tokenizer has ids up to {largest}, but the {name} embeds only {count} "
                "tokens.",
                f"Give the {name} an embedding for every token (resize_token_embeddings and some "
                "training), or use a model with this tokenizer.",
            )
        if count <= largest_emitted:
            return failure(
                f"The policy can emit ids up to {largest_emitted}, but the {name} embeds only "
                f"{count} tokens: the first larger id ends the run.",
                f"Give policy and {name} embeddings of the same size (resize_token_embeddings).",
            )
    if (difference := _find_different_token(case, tokenizer)) is not None:
        return difference
    sizes = ", ".join(str(count) for count in sorted(set(rows.values())))
    return ok(
        f"{len(tokenizer)} tokens, embeddings of {sizes} in all {len(rows)} networks; "
        f"EOS {tokenizer.eos_token!r}, padding {tokenizer.pad_token!r}."
    )


def _find_different_token(case: Case, tokenizer: PreTrainedTokenizerBase) -> Finding | None:
    """Report the first reward model whose special tokens are not the policy's."""
    for model in case.module.reward.models:
        if model.own_text is not None:
            continue
        try:
            reward_tokenizer = load_tokenizer(model.path, model.trust_remote_code)
        except ValueError:  # it has no tokenizer: its text contract is compared
            continue
        for token in ("eos_token", "bos_token"):
            of_policy = _describe_token(tokenizer, token)
            of_reward = _describe_token(reward_tokenizer, token)
            if of_policy != of_reward:
                return failure(
                    f"{token} is {of_policy} for the policy and {of_reward} for the tokenizer of "
                    f"reward model {model.path!r}.",
                    f"Set {token} to the same token in the tokenizers of model.model_path and of "
                    "the reward model, the one that both were trained with.",
                )
    return None


def _describe_token(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """Text and id of a special token, such as `'</s>' (id 2)`."""
    return f"{getattr(tokenizer, name)!r} (id {getattr(tokenizer, f'{name}_id')})"


def check_text_contract(case: Case) -> Finding:
    """Check that reward models and policy were trained on text as this run renders it."""
    module = case.module
    if module.encoder is None:
        return warning(
            "The datamodule has no encoder, so the policy's text contract is not known.",
            "Use lit_rlhf.data.PromptDataModule, or compare the chat templates yourself.",
        )
    contract = module.encoder.contract
    unknown = []
    for model in module.reward.models:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model.check_contract(contract)
            except ValueError as error:
                return failure(
                    str(error),
                    "Set data.chat_template to the template that the reward model was trained "
                    "with, or train a reward model (model.rewards) with the policy's template.",
                )
        unknown += [str(entry.message) for entry in caught]
    if unknown:
        return warning(
            unknown[0], "Train the reward model with lit_rlhf, or compare the templates yourself."
        )
    folder = Path(module.model_path)
    has_contract = (folder / CONTRACT_FILE).is_file()
    if has_contract and (mismatch := TextContract.load(folder).mismatch(contract)):
        return warning(
            f"The policy in {str(folder)!r} was trained on other text than this run's: {mismatch}",
            "Set data.chat_template to the template of SFT.",
        )
    count = len(module.reward.models)
    models = f"{count} reward model{'s' * (count != 1)} and the policy" if count else "The policy"
    end = contract.render()[-24:]
    return ok(f"{models} read this run's text as in training. An example ends {end!r}.")
