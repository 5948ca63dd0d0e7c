"""Prompts given as plain texts, encoded as the prompts of a data file are."""

from collections.abc import Sequence

from lit_rlhf.data.batches import PromptBatch
from lit_rlhf.data.encoding import DialogueEncoder
from lit_rlhf.data.examples import EncodingCounts, collated_prompts, prompt_examples
from lit_rlhf.data.formats import parsed_records
from lit_rlhf.data.records import PromptRecord


def encoded_prompts(prompts: Sequence[str], encoder: DialogueEncoder) -> PromptBatch:
    r"""Render and tokenize prompts.

    Args:
        prompts: Each as in the field ``prompt`` of a data file: what the human says, or a dialogue
            ``\n\nHuman: ...\n\nAssistant: ...\n\nHuman: ...``.
        encoder: The encoder.

    Returns:
        One batch with all of them, in order.

    Raises:
        ValueError: If there is no prompt, or one cannot be used.
    """
    examples = []
    for index, prompt in enumerate(prompts):
        try:
            for record in parsed_records({"prompt": prompt}, "prompt", "prompt", "", ""):
                assert isinstance(record, PromptRecord)  # the kind that was asked for
                examples += prompt_examples(record, encoder, EncodingCounts())
        except ValueError as error:
            raise ValueError(f"prompts[{index}]: {error}, got {prompt!r:.100}") from error
    indexed = [example._replace(index=index) for index, example in enumerate(examples)]
    return collated_prompts(indexed, encoder.pad_token_id)
