"""`lit_rlhf label`: people compare responses in a browser, and their labels become preferences."""

import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lit_callbacks.files import read_json
from lit_rlhf.checks import check_count, check_unit_interval
from lit_rlhf.command import Command
from lit_rlhf.paths import check_data_paths, check_inputs, check_outputs
from lit_rlhf.terminal import print_line
from lit_rlhf.tools.commands.sampling import SamplingFlags

if TYPE_CHECKING:  # they import torch, for which --help does not wait
    from lit_rlhf.data import PromptRecord
    from lit_rlhf.tools.evaluation.labels import Comparison
    from lit_rlhf.tools.evaluation.responses import ResponseLine
    from lit_rlhf.tools.labelling import PageOptions

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHIPPED_GUIDELINES = ("helpful", "harmless")
_INSTALL = (
    "the page needs packages that are not installed: pip install starlette uvicorn markdown-it-py"
)


@dataclass(frozen=True, kw_only=True)
class LabelOptions(SamplingFlags):
    """Let people compare responses in a browser. `lit_rlhf label convert` rewrites their labels.

    Who wrote which response is hidden.

    Attributes:
        output: JSON lines file for the labels. Each is on disk before the page moves on, and the
            same command goes on after an interruption.
        policies: Folders or hub ids of language models, which respond to the prompts before the
            page opens. The first is the baseline, with which the others are compared. A single one
            needs responses_per_prompt of 2 or more, which are compared with each other.
        responses: Files of responses instead, from lit_rlhf generate or others.
        responses_per_prompt: Responses of each policy to each prompt.
        annotators_per_comparison: Number of people who label each comparison.
        repeat_share: Share of comparisons that a person is asked a second time, with the sides
            swapped.
        guidelines: Markdown file that stands beside the comparisons, or helpful or harmless for
            those that come with lit_rlhf, in English and Chinese.
        select: random shows comparisons in random order. spread shows those first on which
            reward_models disagree most, and marks them.
        reward_models: Folders of two or more reward models, or of one with several heads, for
            select spread.
        random_share: Share of comparisons that select spread draws at random, which makes an
            unbiased sample.
        max_comparisons: Show only this many comparisons, the first of the order. Default: all.
        seed: Seed of the sampling, the order and the sides.
        host: Address that the page is bound to.
        port: Port of the page; 0 takes a free one.
        allow_remote: Allow a host that other machines reach. Whoever has the address with its token
            can read all texts and add labels, and the connection is not encrypted.
    """

    output: str
    policies: list[str] | None = None
    responses: list[str] | None = None
    responses_per_prompt: int = 1
    annotators_per_comparison: int = 1
    repeat_share: float = 0.1
    guidelines: str = "helpful"
    select: Literal["random", "spread"] = "random"
    reward_models: list[str] | None = None
    random_share: float = 0.25
    max_comparisons: int | None = None
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 8642
    allow_remote: bool = False


def label(options: LabelOptions) -> None:
    """Sample what is missing, open the page, and serve it until it is interrupted.

    Args:
        options: What to compare, and who labels it.
    """
    _check_options(options)
    try:
        import markdown_it  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    from lit_rlhf.tools.labelling import (
        BODY_SECONDS,
        LabelStore,
        Schedule,
        ScheduleOptions,
        build_app,
        order_comparisons,
        pair_responses,
    )

    listener = _listen(options)
    port = listener.getsockname()[1]
    lines = _read_responses(options)
    comparisons = pair_responses(lines)
    order = order_comparisons(
        comparisons,
        seed=options.seed,
        spreads=_measure_spreads(options, comparisons),
        random_share=options.random_share,
    )[: options.max_comparisons]
    store = LabelStore(options.output, order)
    try:
        schedule = Schedule(
            order,
            store,
            ScheduleOptions(
                annotators_per_comparison=options.annotators_per_comparison,
                repeat_share=options.repeat_share,
                seed=options.seed,
            ),
            policies=_hash_policies(options, lines),
            open_tasks=_hidden_file(options.output, "open"),
        )
        page = _page_options(options, port)
        n_equal = sum(comparison.is_equal for comparison in order)
        if n_equal:
            print_line(f"{n_equal} pairs of equal responses are ties, which nobody is shown.")
        print_line(
            f"{len(order) - n_equal} comparisons, {len(store.labels)} labels in {options.output}"
        )
        print_line(
            f"Open http://{_shown_host(options.host)}:{port}/?token={page.token}", flush=True
        )
        print("Ctrl-C ends the page; the same command goes on.", flush=True)
        server = uvicorn.Server(
            uvicorn.Config(
                build_app(schedule, page),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=int(BODY_SECONDS) + 2,
            )
        )
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            print()
        print_line(f"{len(store.labels)} labels in {options.output}")
    finally:
        store.close()


def _check_options(options: LabelOptions) -> None:
    """Refuse options that do not fit together, before torch is imported."""
    if (options.policies is None) == (options.responses is None):
        raise ValueError(
            "policies, responses: expected one of them, models that respond to --prompts or files "
            f"of responses, got {'none' if options.policies is None else 'both'}"
        )
    if options.policies is not None and options.prompts is None:
        raise ValueError("prompts: expected a file of prompts or a dataset's id, got none")
    if options.responses is not None and options.prompts is not None:
        raise ValueError(
            "prompts: expected none with files of responses, which have prompts, got "
            f"{options.prompts!r}"
        )
    check_outputs({"output": options.output}, [options.prompts, *(options.responses or [])])
    check_inputs(
        {"policies": options.policies, "reward_models": options.reward_models},
        [*(options.responses or []), options.prompts],
    )
    for name in ("responses_per_prompt", "annotators_per_comparison", "max_comparisons"):
        if getattr(options, name) is not None:
            check_count(name, getattr(options, name))
    if not 0 <= options.port < 2**16:
        raise ValueError(f"port: expected a number from 0 to {2**16 - 1}, got {options.port}")
    for name in ("repeat_share", "random_share"):
        check_unit_interval(name, getattr(options, name))
    if (options.select == "spread") != (options.reward_models is not None):
        raise ValueError(
            "select, reward_models: expected both or neither, --select spread with reward models "
            f"that may disagree, got {options.select!r} with {options.reward_models}"
        )
    if options.host not in _LOOPBACK and not options.allow_remote:
        raise ValueError(
            f"host: expected one of {', '.join(_LOOPBACK)}, got {options.host!r}; with "
            "--allow_remote other machines reach the page: whoever has the address with its token "
            "can read all texts and add labels, and the connection is not encrypted"
        )
    if options.guidelines not in _SHIPPED_GUIDELINES and not Path(options.guidelines).is_file():
        raise ValueError(
            f"guidelines: expected a Markdown file, or {' or '.join(_SHIPPED_GUIDELINES)}, got "
            f"{options.guidelines!r}"
        )


def _listen(options: LabelOptions) -> socket.socket:
    """Open the port, before responses are sampled for hours."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=128)
    except OSError as error:
        raise OSError(
            f"port: expected a free one, got {options.port} on {options.host}: {error}; --port 0 "
            "takes a free one"
        ) from error


def _read_responses(options: LabelOptions) -> "dict[str, list[ResponseLine]]":
    """Read the responses, after sampling those that are missing."""
    from lit_rlhf.files import check_responses, lock_outputs
    from lit_rlhf.tools.evaluation.responses import read_response_lines

    if options.responses is not None:
        for path in options.responses:
            check_responses(Path(path))
        return read_response_lines(options.responses, options.max_prompts)
    folder = Path(options.output).with_suffix(".responses")
    with lock_outputs([folder]):
        return read_response_lines(_sample_responses(options, options.policies or [], folder))


def _sample_responses(options: LabelOptions, policies: Sequence[str], folder: Path) -> list[str]:
    """Sample the responses of each policy, and return their files.

    A file that is there already is used as it is, if it was sampled with the same options.
    """
    from lit_rlhf.tools.evaluation import read_prompts
    from lit_rlhf.tools.evaluation.loading import short_names

    assert options.source is not None  # checked
    prompts = read_prompts(options.source, options.max_prompts, options.on_bad_record)
    files = []
    for name, policy in zip(short_names(policies, "policies"), policies, strict=True):
        file = folder / f"{name.replace('/', '_')}.jsonl"
        files.append(str(file))
        if file.exists():
            _check_sampled_alike(file, options, policy, prompts)
        else:
            options.sample_responses(
                [policy],
                prompts,
                responses_per_prompt=options.responses_per_prompt,
                seed=options.seed,
                output=file,
            )
    return files


def _check_sampled_alike(
    file: Path, options: LabelOptions, policy: str, prompts: "Sequence[PromptRecord]"
) -> None:
    """Refuse a file of responses that were sampled with other options than these.

    Args:
        file: The responses of one policy.
        options: The options of this command.
        policy: Folder or hub id of the policy.
        prompts: The prompts that the options name.
    """
    from lit_rlhf.files import check_responses, hash_model
    from lit_rlhf.tools.evaluation.responses import read_response_lines

    actual = check_responses(file)
    expected = {
        "models": {policy: hash_model(policy)},
        "seed": options.seed,
        **asdict(options.sampling),
        "responses_per_prompt": options.responses_per_prompt,
        "batch_size": options.batch_size,
        "chat_template": options.chat_template,
        "dtype": options.dtype,
    }
    differing = [key for key, value in expected.items() if actual.get(key) != value]
    details = "; ".join(f"{key}: {actual.get(key)} there, {expected[key]} now" for key in differing)
    (lines,) = read_response_lines([str(file)]).values()
    answered = [line.prompt for line in lines[:: options.responses_per_prompt]]
    if answered != [prompt.prompt for prompt in prompts]:
        differing.append("prompts")
    if differing:
        raise ValueError(
            f"{file}: expected responses sampled with the options of this command, got others "
            f"with another value of {', '.join(differing)} ({details or 'other prompts'}). "
            "Give another --output, or delete the file to sample again"
        )


def _measure_spreads(
    options: LabelOptions, comparisons: "Sequence[Comparison]"
) -> list[float] | None:
    """How much reward models disagree on which response is better; `None` for a random order."""
    if options.reward_models is None:
        return None
    from lit_rlhf.tools.evaluation.loading import choose_device
    from lit_rlhf.tools.labelling.spread import difference_spreads

    return difference_spreads(
        comparisons,
        options.reward_models,
        policy=None if options.policies is None else options.policies[0],
        model_options=options.model_options,
        device=choose_device(options.device),
        chat_template=options.chat_template,
    )


def _hash_policies(
    options: LabelOptions, lines: "Mapping[str, Sequence[ResponseLine]]"
) -> dict[str, str | None]:
    """SHA-256 of each policy by name, as far as a folder or a manifest tells it."""
    from lit_rlhf.files import hash_model, read_manifest

    if options.policies is not None:
        return {name: hash_model(path) for name, path in zip(lines, options.policies, strict=True)}
    hashes: dict[str, str | None] = {}
    for name, of_policy in lines.items():
        models = read_manifest(of_policy[0].location.file).get("made", {}).get("models", {})
        hashes[name] = next(iter(models.values())) if len(models) == 1 else models.get(name)
    return hashes


def _page_options(options: LabelOptions, port: int) -> "PageOptions":
    """What the page shows and who gets in; a restarted page keeps its token and its secret."""
    from lit_rlhf.tools.labelling import PageOptions

    session = _load_session(options.output)
    names = ("127.0.0.1", "localhost", "[::1]")
    return PageOptions(
        token=session["token"],
        secret=bytes.fromhex(session["secret"]),
        guidelines=_read_guidelines(options.guidelines),
        hosts=() if options.host not in _LOOPBACK else [f"{name}:{port}" for name in names],
        cookie=f"lit_rlhf_label_{port}",
    )


def _hidden_file(output: str | Path, content: str) -> Path:
    """The file beside the labels in which the page keeps something for a restart.

    Args:
        output: The file of labels.
        content: What is kept, a part of the name.
    """
    path = Path(output)
    return path.with_name(f".{path.name}.{content}.json")


def _load_session(output: str | Path) -> dict[str, str]:
    """Read the token and the secret of the page, or make them: a file for the user alone."""
    path = _hidden_file(output, "session")
    if os.path.lexists(path):
        # what another account has left would let it in
        if path.is_symlink() or path.stat().st_uid != os.getuid():
            raise ValueError(
                f"{path}: expected a file of your own, got a link or another account's"
            )
        kept = read_json(path, dict)
        try:
            return {"token": str(kept["token"]), "secret": str(kept["secret"])}
        except KeyError as error:
            raise ValueError(
                f"{path}: expected the page's token and secret, got something else; delete it"
            ) from error
    session = {"token": secrets.token_urlsafe(24), "secret": secrets.token_hex(32)}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(session, file)
        file.flush()
        os.fsync(file.fileno())
    return session


def _read_guidelines(guidelines: str) -> dict[Literal["en", "zh"], str]:
    """The guidelines by language of the page; one's own are the same in both."""
    from lit_rlhf.files import read_text

    if guidelines in _SHIPPED_GUIDELINES:
        from lit_rlhf.tools.labelling.words import WORDS

        folder = Path(__file__).parents[1] / "labelling" / "guidelines"
        return {code: (folder / f"{guidelines}.{code}.md").read_text("utf-8") for code in WORDS}
    text = read_text(guidelines)
    return {"en": text, "zh": text}


def _shown_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # only shown
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def convert(labels: list[str], output: str, *, format: Literal["hh", "trl"] = "trl") -> None:
    """Convert labels to preference pairs for other programs.

    Args:
        labels: Files of labels.
        output: JSON lines file to write.
        format: hh for HH-RLHF's columns chosen and rejected, whole dialogues each; trl for TRL's
            prompt, chosen and rejected, lists of turns.
    """
    check_outputs({"output": output}, labels)
    check_data_paths(labels)
    from lit_rlhf.data import DataCounts, DataSource, load_records
    from lit_rlhf.files import write_json_lines
    from lit_rlhf.tools.labelling.convert import preference_rows

    counts = DataCounts()
    sources = [DataSource(path, name=path, format="labels") for path in labels]
    records = load_records("preference", sources, counts=counts)
    path = write_json_lines(output, preference_rows(records, format))
    left_out = ", ".join(f"{n} x {reason}" for reason, n in counts.undecided.items())
    print_line(
        f"{len(records)} preferences in {path}" + (f"; left out: {left_out}" if left_out else "")
    )


COMMAND = Command(
    LabelOptions,
    lists=("policies", "responses", "reward_models"),
    flags=("allow_remote",),
    then=label,
    writes=("output",),
)
CONVERT = Command(convert, lists=("labels",), writes=("output",))


def main(argv: Sequence[str]) -> None:
    """Run `lit_rlhf label`, or `lit_rlhf label convert`."""
    if argv and argv[0] == "convert":
        CONVERT.run(argv[1:], "lit_rlhf label convert")
        return
    COMMAND.run(argv, "lit_rlhf label")
