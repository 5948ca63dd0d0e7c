"""Prompts given as plain texts, read and encoded as the prompts of a data file are."""

from collections.abc import Sequence

from lit_rlhf.data.batches import PromptBatch
from lit_rlhf.data.encoding import DialogueEncoder, EncodingError
from lit_rlhf.data.examples import EncodingCounts, collated_prompts, prompt_examples
from lit_rlhf.data.formats import parsed_records
from lit_rlhf.data.records import PromptRecord
from lit_rlhf.data.rows import FieldError


def parsed_prompts(prompts: Sequence[str]) -> list[PromptRecord]:
    r"""Read prompts, one record each.

    Args:
        prompts: Each as in the field ``prompt`` of a data file: what the human says, or a dialogue
            ``\n\nHuman: ...\n\nAssistant: ...\n\nHuman: ...``.

    Returns:
        The records, in order; their source is ``prompts``, their line the prompt's number from 1.

    Raises:
        ValueError: If one cannot be used.
    """
    records = []
    for index, prompt in enumerate(prompts):
        place = f"prompts:{index + 1}"
        try:
            (record,) = parsed_records({"prompt": prompt}, "prompt", "prompt", "prompts", place)
        except FieldError as error:
            raise _unusable(prompts, index, error) from error
        assert isinstance(record, PromptRecord)  # the kind that was asked for
        records.append(record)
    return records


def encode_prompts(prompts: Sequence[str], encoder: DialogueEncoder) -> PromptBatch:
    """Render and tokenize prompts.

    Args:
        prompts: As for :func:`parsed_prompts`.
        encoder: The encoder.

    Returns:
        One batch with all of them, in order.

    Raises:
        ValueError: If there is no prompt, or one cannot be used.
    """
    examples = []
    for index, record in enumerate(parsed_prompts(prompts)):
        try:
            (example,) = prompt_examples(record, encoder, EncodingCounts())
        except EncodingError as error:
            raise _unusable(prompts, index, error) from error
        examples.append(example._replace(index=index))
    return collated_prompts(examples, encoder.pad_token_id)


def _unusable(prompts: Sequence[str], index: int, error: ValueError) -> ValueError:
    return ValueError(f"prompts[{index}]: {error}, got {prompts[index]!r:.100}")
