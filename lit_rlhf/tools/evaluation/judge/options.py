"""The endpoint of the judge of policies, and what helps when it cannot be asked."""

import os

from lit_rlhf.remote import RemoteError
from lit_rlhf.rewards.judge import JudgeEndpoint
from lit_rlhf.rewards.judge.comparing import JudgeReply, Question, compare_answers
from lit_rlhf.rewards.judge.endpoint import NoCompletionError
from lit_rlhf.tools.judge_options import JudgeOptions as JudgeOptions

_MAX_ERROR = 1000  # characters of a message about an error


class JudgeError(OSError):
    """The judge cannot be asked; the message says why and what to do."""


def open_judge(options: JudgeOptions) -> JudgeEndpoint:
    """Open the endpoint of a judge, with the key in the environment."""
    key = os.environ.get(options.api_key_variable)
    if not key and options.base_url is None:
        raise ValueError(
            "judge.api_key_variable: expected the key of OpenAI's endpoint in the environment "
            f"variable {options.api_key_variable}, which is not set. Set it, or give the "
            "address of your own server as judge.base_url"
        )
    return JudgeEndpoint(
        model=str(options.model),
        base_url=options.base_url,
        key=key,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        timeout=options.timeout,
        retries=options.max_retries,
        concurrency=options.concurrency,
    )


def ask_judge(endpoint: JudgeEndpoint, question: Question, options: JudgeOptions) -> JudgeReply:
    """Ask a question until the reply can be read, at most `options.max_attempts` times.

    Args:
        endpoint: The endpoint of the judge.
        question: Two answers to compare.
        options: Options of the judge.

    Raises:
        JudgeError: If the judge cannot be asked.
    """
    try:
        return compare_answers(
            endpoint,
            question,
            max_characters=options.max_characters,
            attempts=options.max_attempts,
        )
    except NoCompletionError as error:
        raise JudgeError(f"judge.base_url: {error}") from error
    except RemoteError as error:
        raise JudgeError(_describe(error, endpoint.address, options)) from error


def _describe(error: RemoteError, address: str, options: JudgeOptions) -> str:
    """Say what happened and what helps."""
    advice = _advise(error, options)
    return f"the judge at {address} {advice}. The client says: {error.problem}"[:_MAX_ERROR]


def _advise(error: RemoteError, options: JudgeOptions) -> str:
    """Say what the endpoint does and what helps, as the rest of a sentence."""
    repeated = f"after {options.max_retries} retries (judge.max_retries)"
    if error.timed_out:
        return (
            f"did not reply within {options.timeout:g} seconds {repeated}. Raise judge.timeout or "
            "lower judge.concurrency"
        )
    match error.status:
        case None:
            return (
                f"cannot be reached {repeated}. Check that the server runs and that judge.base_url "
                "is its address"
            )
        case 401 | 403:
            return (
                "does not accept the key. Set the environment variable "
                f"{options.api_key_variable} to a valid one, or name another variable with "
                "judge.api_key_variable"
            )
        case 404:
            return (
                f"knows no model {options.model!r}, or the address is wrong. Check judge.model and "
                "judge.base_url, which usually ends in /v1"
            )
        case 429:
            return (
                f"still limits the rate {repeated}. Lower judge.concurrency, wait, or check your "
                "quota"
            )
        case status if status < 300:
            return "does not reply as an OpenAI-compatible endpoint does"
        case status if status < 400:
            return (
                "redirects to another address, which would get the texts and is not followed; "
                "give that address as judge.base_url"
            )
        case status if status >= 500:
            return f"fails {repeated}; its log tells why"
    return (
        "refuses the request. If it does not support a setting, change judge.temperature (null "
        "sends none) or judge.max_tokens; if the texts are too long for it, lower "
        "judge.max_characters"
    )
