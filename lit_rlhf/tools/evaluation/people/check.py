"""Check that labels are about the policies that are evaluated."""

import hashlib
from collections.abc import Mapping, Sequence

from lit_rlhf.files import hash_model
from lit_rlhf.paths import is_file_path
from lit_rlhf.tools.evaluation.labels import Label
from lit_rlhf.tools.evaluation.loading import short_names
from lit_rlhf.tools.evaluation.responses import Turns, read_response_lines


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
        responses = {
            name: _group_by_prompt([(line.prompt, line.response) for line in of_policy])
            for name, of_policy in lines.items()
        }
        for label in labels:
            for name, response in (
                (label.policy_a, label.response_a),
                (label.policy_b, label.response_b),
            ):
                response_texts = responses.get(name, {}).get(label.prompt)
                if response_texts is not None and response not in response_texts:
                    raise ValueError(
                        f"labels: expected labels of the responses of {name!r}, got one of a "
                        f"response with the SHA-256 {_hash(response)}; the response to its prompt "
                        f"has {_hash(response_texts[0])}. The responses have changed since"
                    )
    else:
        names = short_names(policies, "policies")
        hashes = {name: hash_model(path) for name, path in zip(names, policies, strict=True)}
        for label in labels:
            for name, expected in _known_hashes(label.policies, hashes):
                if expected != label.policies[name]:
                    raise ValueError(
                        f"labels: expected labels of the policy {name!r} with the SHA-256 "
                        f"{expected}, got labels of one with {label.policies[name]}: the policy "
                        "has been trained again since. Label its new responses"
                    )
    unknown = labelled - set(names)
    if unknown:
        raise ValueError(
            f"policies: expected all policies of the labels, {', '.join(sorted(labelled))}, got "
            f"{', '.join(names)}"
        )
    return names[0]


def _known_hashes(
    of_label: Mapping[str, str | None], hashes: Mapping[str, str | None]
) -> list[tuple[str, str]]:
    """Hashes of policies that both sides know, by name."""
    return [
        (name, expected)
        for name, expected in hashes.items()
        if expected is not None and of_label.get(name) is not None
    ]


def _group_by_prompt(pairs: Sequence[tuple[Turns, str]]) -> dict[Turns, list[str]]:
    responses: dict[Turns, list[str]] = {}
    for prompt, response in pairs:
        responses.setdefault(prompt, []).append(response)
    return responses


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
