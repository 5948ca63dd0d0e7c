"""Check that labels are about the policies that are evaluated."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

from lit_rlhf.files import hash_model
from lit_rlhf.paths import is_file_path
from lit_rlhf.tools.evaluation.labels import Label
from lit_rlhf.tools.evaluation.loading import short_names
from lit_rlhf.tools.evaluation.responses import ResponseLine, Turns, read_response_lines


def check_labelled_policies(labels: Sequence[Label], policies: Sequence[str]) -> str:
    """Refuse labels of other policies, or of responses that have changed since.

    Args:
        labels: The labels.
        policies: Folders or hub ids, or files of responses; the first is the baseline.

    Returns:
        Name of the baseline.

    Raises:
        ValueError: If they do not fit; the message has the hashes of both.
    """
    labelled = {name for label in labels for name in (label.policy_a, label.policy_b)}
    if any(is_file_path(policy) for policy in policies):
        lines = read_response_lines(policies)
        names = list(lines)
        _check_responses_unchanged(labels, lines)
    else:
        names = short_names(policies, "policies")
        hashes = {name: hash_model(path) for name, path in zip(names, policies, strict=True)}
        _check_models_unchanged(labels, hashes)
    unknown = labelled - set(names)
    if unknown:
        raise ValueError(
            f"policies: expected all policies of the labels, {', '.join(sorted(labelled))}, got "
            f"{', '.join(names)}"
        )
    return names[0]


def _check_responses_unchanged(
    labels: Sequence[Label], lines: Mapping[str, Sequence[ResponseLine]]
) -> None:
    """Refuse a label of a response that its policy's file does not have for the prompt.

    Args:
        labels: The labels.
        lines: Lines of the files of responses, by policy.
    """
    responses: dict[tuple[str, Turns], list[str]] = defaultdict(list)
    for name, of_policy in lines.items():
        for line in of_policy:
            responses[name, line.prompt].append(line.response)
    for label in labels:
        for name, response in (
            (label.policy_a, label.response_a),
            (label.policy_b, label.response_b),
        ):
            in_file = responses.get((name, label.prompt))
            if in_file is not None and response not in in_file:
                raise ValueError(
                    f"labels: expected labels of the responses of {name!r}, got one of a "
                    f"response with the SHA-256 {_hash(response)}; the response to its prompt "
                    f"has {_hash(in_file[0])}. The responses have changed since"
                )


def _check_models_unchanged(labels: Sequence[Label], hashes: Mapping[str, str | None]) -> None:
    """Refuse a label of a model that has another hash now.

    Args:
        labels: The labels.
        hashes: SHA-256 of each policy by name; `None` where it is not known.
    """
    for label in labels:
        for name, expected in hashes.items():
            actual = label.policies.get(name)
            if expected is not None and actual is not None and actual != expected:
                raise ValueError(
                    f"labels: expected labels of the policy {name!r} with the SHA-256 "
                    f"{expected}, got labels of one with {actual}: the policy has been trained "
                    "again since. Label its new responses"
                )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
