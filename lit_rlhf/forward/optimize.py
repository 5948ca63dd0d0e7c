"""Choosing the fastest forward of a network that gives the same outputs, once, after loading."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import is_flash_attention_requested

from lit_rlhf.forward.attention import (
    ATTENTION_NAME,
    BASE_ATTENTION,
    attention_implementation,
    supports_layouts,
)
from lit_rlhf.forward.cpu import (
    ROW_MULTIPLE,
    TOKEN_MULTIPLE,
    PadToMultiple,
    limit_cached_kernels,
    mkl_is_slow,
    use_onednn_matmul,
)
from lit_rlhf.forward.lower import LowerStates, count_frozen_layers
from lit_rlhf.forward.networks import (
    PLAN_ATTRIBUTE,
    ForwardPlan,
    LanguageModel,
    ModuleT,
    eval_mode,
    trunk_of,
    unwrap_model,
)
from lit_rlhf.forward.outputs import hidden_states, logits_from_hidden, token_logits
from lit_rlhf.forward.packing import packed_states
from lit_rlhf.forward.positions import (
    has_varying_positions,
    longest_sequence,
    set_longest_sequence,
)
from lit_rlhf.rank_zero import rank_zero_info

_PROBE_LENGTHS = (12, 7, 9)  # tokens of the rows on which packed and padded forward are compared


class UnusableNetworkError(ValueError):
    """A network that computes nothing finite from any tokens."""


def optimize_forward(model: ModuleT, role: str = "") -> ModuleT:
    """Choose how `model` computes its forward, and change it in place accordingly.

    All of this project's loading functions call it. Call it to make other networks as fast: a plain
    transformers model computes padded forwards and whole logits. Weights and their names stay as
    they are. `forward_plan` returns the decision:

    - Packed forward: chosen if the trunk uses transformers' `sdpa` or flash attention and its
      padded and packed outputs agree on a few random tokens. Its attention implementation becomes
      this project's, which is `sdpa` wherever no packed tokens come in. On a GPU in half precision,
      that is flash attention as well.
    - Chunked logits: chosen if the forward is packed and the trunk followed by the output layer
      gives the model's own logits.
    - oneDNN matmul: chosen on CPUs where MKL is slow.

    Call it after adapters are added and before torch.compile and kernels that need a GPU: the
    comparison runs where the weights are, which is the CPU after loading. The decision holds for
    any device and dtype that the network has later. A second call changes nothing.

    Of an output layer or another layer on its own, it only chooses the matmul.

    Args:
        model: The network.
        role: What it is for, such as `critic`, for the message; empty: it is not said.

    Raises:
        UnusableNetworkError: If the network computes NaN or infinity for all tokens of a probe.
    """
    limit_cached_kernels()
    onednn_matmul = mkl_is_slow()
    if onednn_matmul:
        use_onednn_matmul(model)
    if isinstance(model, nn.Linear):
        return model
    inner = unwrap_model(model)
    if hasattr(inner, PLAN_ATTRIBUTE):
        return model
    varying_positions = _fix_positions(inner)
    reason = _install_packing(inner)
    head = inner.get_output_embeddings()  # type: ignore[no-untyped-call]
    plan = ForwardPlan(
        packed=not reason,
        chunked_logits=not reason
        and isinstance(head, nn.Module)
        and head_matches_logits(inner, head),
        reason=reason,
        onednn_matmul=onednn_matmul,
        token_padding=PadToMultiple.for_network(inner.base_model, TOKEN_MULTIPLE),
        row_padding=PadToMultiple.for_network(inner, ROW_MULTIPLE),
        lower_layers=0 if reason else _count_lower_layers(inner),
        varying_positions=varying_positions,
    )
    setattr(inner, PLAN_ATTRIBUTE, plan)
    source = f" from {inner.name_or_path}" if inner.name_or_path else ""
    prefix = f"{role}: " if role else ""
    rank_zero_info(f"{prefix}{type(inner).__name__}{source}: {_describe(plan)}")
    return model


def head_matches_logits(model: LanguageModel, lm_head: nn.Module) -> bool:
    """Whether `logits_from_hidden` with this output layer gives the model's own logits."""
    inner = unwrap_model(model)
    ids = torch.arange(4, device=inner.device).unsqueeze(0)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with _probe_mode(inner, inner.device), _without_flash_attention(inner):
        expected = token_logits(inner, ids, mask)
        actual = logits_from_hidden(inner, lm_head, hidden_states(inner, ids, mask))
        is_possible = expected > -torch.inf  # the network may rule out ids
        return _outputs_agree(actual[is_possible], expected[is_possible])


def _fix_positions(model: PreTrainedModel) -> bool:
    """Fix rotary factors that depend on the longest row, and say whether there are any.

    Raises:
        ValueError: If a row changes all the same beside a longer one, on either side of the length
            at which factors change.
    """
    longest = longest_sequence(model)
    if longest is None and has_varying_positions(model.config):
        raise ValueError(
            f"path: expected a model whose rotary positions are transformers' own, got "
            f"{type(model).__name__}, whose factors depend on the longest sequence of a batch, by "
            "code that is not known here"
        )
    if longest is None:
        return False
    # until the run's longest sequence is known
    set_longest_sequence(model, longest)
    ids = torch.arange(2 * _PROBE_LENGTHS[0], device=model.device).view(2, -1)
    positions = torch.arange(ids.shape[1], device=model.device)
    ones = torch.ones_like(ids)

    def compute(rows: int, position_ids: Tensor) -> Tensor:
        states: Tensor = model.base_model(
            input_ids=ids[:rows],
            attention_mask=ones[:rows],
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        return states[0]

    try:
        for length in (longest, 2 * longest):
            set_longest_sequence(model, length)
            # a few tokens at the end of the longest sequence have its positions
            beside = torch.stack([positions, positions + length - len(positions)])
            with _probe_mode(model, model.device), _without_flash_attention(model):
                agree = _outputs_agree(compute(2, beside), compute(1, positions[None]))
            if not agree:
                raise ValueError(
                    f"path: expected a model whose outputs for a sequence do not depend on the "
                    f"others in its batch, got {type(model).__name__}, in which they change beside "
                    f"one of {length} tokens; its rotary positions cannot be fixed"
                )
    finally:
        set_longest_sequence(model, longest)
    return True


def _install_packing(model: PreTrainedModel) -> str:
    """Switch the trunk to this project's attention, or return why its forward stays padded."""
    try:
        trunk = trunk_of(model)
    except ValueError:
        return "its trunk is not separate from its head"
    implementation = attention_implementation(trunk)
    # The trunk of an optimized model has the attention already, for instance under a new head.
    is_supported = implementation in (BASE_ATTENTION, ATTENTION_NAME)
    if implementation is None or not (is_supported or is_flash_attention_requested(trunk.config)):
        return (
            f"its attention implementation is {implementation!r} and packing needs "
            f"{BASE_ATTENTION!r} or flash attention"
        )
    if not supports_layouts(trunk):
        return "its attention does not use transformers' attention interface"
    try:
        reason = "" if _packed_outputs_agree(trunk) else "its packed and padded outputs differ"
    except UnusableNetworkError:  # no forward helps
        raise
    # Whatever the model's own code raises on packed tokens: the padded forward is the one it knows.
    except Exception as error:
        reason = f"its packed forward raised {error!r}"
    if reason:
        trunk.set_attn_implementation(
            BASE_ATTENTION if implementation == ATTENTION_NAME else implementation
        )
    return reason


def _packed_outputs_agree(trunk: PreTrainedModel) -> bool:
    """Whether packed outputs are the padded ones: recurrences, say, mix tokens without attention.

    The trunk is left with this project's attention.
    """
    embedding = trunk.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    device = embedding.device
    mask = torch.arange(max(_PROBE_LENGTHS)) < torch.tensor(_PROBE_LENGTHS).unsqueeze(1)
    # a generator of its own: the caller's random state stays as it was
    ids = torch.randint(len(embedding), mask.shape, generator=torch.Generator().manual_seed(0))
    ids, mask = ids.to(device), mask.to(device)
    with _probe_mode(trunk, device):
        with _without_flash_attention(trunk):
            padded: Tensor = trunk(
                input_ids=ids, attention_mask=mask.long(), use_cache=False
            ).last_hidden_state
        if not bool(padded[mask].isfinite().any()):
            raise UnusableNetworkError(
                f"path: expected a model with finite outputs at {trunk.name_or_path}, got NaN or "
                f"infinity for every token from {type(trunk).__name__}: a number in its "
                "configuration or its weights is wrong"
            )
        trunk.set_attn_implementation(ATTENTION_NAME)
        return _outputs_agree(packed_states(trunk, ids, mask)[mask], padded[mask])


def _count_lower_layers(model: PreTrainedModel) -> int:
    """Number of layers below the trained ones; 0 where the others need more than their outputs."""
    trunk = trunk_of(model)
    if all(parameter.requires_grad for parameter in trunk.parameters()):
        return 0
    ids = torch.arange(4, device=model.device).unsqueeze(0)
    mask = torch.ones_like(ids, dtype=torch.bool)
    try:
        lower = LowerStates(count_frozen_layers(trunk))
        if not lower.n_layers:
            return 0
        with _probe_mode(model, model.device), lower.recording(model, mask):
            expected = packed_states(trunk, ids, mask)
        with _probe_mode(model, model.device):
            # with other tokens, which the layers above must not see
            actual = packed_states(
                trunk, ids + 1, mask, n_lower=lower.n_layers, lower=lower.states()
            )
    # whatever the model's own code raises: its layers are computed again
    except Exception as error:
        rank_zero_info(f"{type(model).__name__}: computes its lower layers anew: {error!r}")
        return 0
    return lower.n_layers if torch.equal(actual, expected) else 0


@contextmanager
def _probe_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode without gradients, autocast and reduced precision of float32 products.

    The last two round by more than padded and packed outputs may differ.
    """
    with (
        eval_mode(model),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        _exact_float32_matmul(),
    ):
        yield


@contextmanager
def _exact_float32_matmul() -> Iterator[None]:
    """Multiply float32 matrices in float32 inside the context.

    Lightning advises `torch.set_float32_matmul_precision("medium")` on GPUs with tensor cores, and
    on a CPU with bfloat16 instructions it makes every product a bfloat16 one.
    """
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch 2.8
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
        return
    # torch.get_float32_matmul_precision raises where a user has set these instead
    onednn = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch makes it at import
    backends = (onednn, torch.backends.cuda.matmul)
    precisions = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision


@contextmanager
def _without_flash_attention(model: PreTrainedModel) -> Iterator[None]:
    """`eager` attention in place of flash attention, which needs a GPU and half precision.

    Unlike `sdpa`, `eager` knows every setting that flash attention knows, such as capped scores.
    """
    implementation = attention_implementation(model)
    if implementation is None or not is_flash_attention_requested(model.config):
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


def _outputs_agree(actual: Tensor, expected: Tensor) -> bool:
    """Whether two outputs in the model's dtype are equal up to rounding."""
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    # bfloat16 rounds by 0.4 % in every layer, which adds up to about 2 %, and float32 by 1e-5. A
    # token that attends to a wrong one, or has a wrong position, is off by far more than either.
    half_precision = expected.dtype in (torch.bfloat16, torch.float16)
    return bool(error < (0.05 if half_precision else 1e-3))


def _describe(plan: ForwardPlan) -> str:
    if not plan.packed:
        return f"padded forward, because {plan.reason}"
    parts = ["packed forward"]
    if plan.chunked_logits:
        parts.append("chunked logits")
    if plan.lower_layers:
        parts.append(f"keeps what its lowest {plan.lower_layers} layers give")
    if plan.onednn_matmul:
        parts.append("oneDNN matmul on the CPU")
    return ", ".join(parts)
