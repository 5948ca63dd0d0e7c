"""Networks that hold the same frozen weights once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lit_rlhf.forward import disable_dropout, forward_plan, token_values, unwrap_model
from lit_rlhf.models import ModelOptions, load_causal_lm, load_scalar_model, separate_weights
from tests.support.tiny_models import move_adapters

LORA = ModelOptions(lora_rank=2, gradient_checkpointing=True)
IDS = torch.arange(3, 11).unsqueeze(0)
MASK = torch.ones_like(IDS, dtype=torch.bool)
FAMILIES = ("llama", "gpt2")


def shared_bytes(*networks: torch.nn.Module) -> int:
    """Bytes of the weights of all networks, each storage once."""
    parameters = [parameter for network in networks for parameter in network.parameters()]
    storages = [parameter.untyped_storage() for parameter in parameters]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_critic_on_policy_is_whole(causal_folder: Callable[[str], Path], family: str) -> None:
    folder = causal_folder(family)
    policy = load_causal_lm(folder, LORA)
    move_adapters(policy)  # it is in training, which the critic knows nothing of
    own = disable_dropout(load_scalar_model(folder, LORA, head_seed=3))
    critic = disable_dropout(load_scalar_model(folder, LORA, head_seed=3, base=policy))
    assert forward_plan(critic).packed is forward_plan(own).packed
    assert torch.equal(token_values(critic, IDS, MASK), token_values(own, IDS, MASK))
    assert critic.state_dict().keys() == own.state_dict().keys()
    trained = [p for p in critic.parameters() if p.requires_grad]
    assert len(trained) == len([p for p in own.parameters() if p.requires_grad])
    # beside the policy, the critic takes its adapters and its head, trained and as loaded
    head = critic.get_parameter("base_model.model.score.original_module.weight")
    added = sum(p.nbytes for p in [*trained, head])
    assert shared_bytes(policy, critic) == shared_bytes(policy) + added
    assert not {id(p) for p in trained} & {id(p) for p in policy.parameters()}


def test_critic_on_reward_has_a_head(causal_folder: Callable[[str], Path], tmp_path: Path) -> None:
    reward = load_scalar_model(causal_folder("llama"), head_seed=1).requires_grad_(False).eval()
    scores = token_values(reward, IDS, MASK)
    critic = load_scalar_model("not read", LORA, base=reward)
    assert torch.equal(token_values(critic, IDS, MASK), scores)
    token_values(critic, IDS, MASK).sum().backward()
    torch.optim.SGD([p for p in critic.parameters() if p.requires_grad], lr=1.0).step()
    assert not torch.equal(token_values(critic, IDS, MASK), scores)
    assert torch.equal(token_values(reward, IDS, MASK), scores)
    assert not reward.training
    assert not any(p.requires_grad for p in reward.parameters())


def test_trained_weights_are_not_shared(causal_folder: Callable[[str], Path]) -> None:
    policy = load_causal_lm(causal_folder("llama"))
    with pytest.raises(ValueError, match=r"expected frozen weights .*, got trained .*embed_tokens"):
        load_scalar_model(causal_folder("llama"), LORA, head_seed=0, base=policy)


def test_different_weights_are_separated(causal_folder: Callable[[str], Path]) -> None:
    policy = load_causal_lm(causal_folder("llama"), LORA)
    critic = load_scalar_model(causal_folder("llama"), LORA, head_seed=0, base=policy)
    both = torch.nn.ModuleDict({"policy": policy, "critic": critic})
    state = {name: tensor.clone() for name, tensor in both.state_dict().items()}
    separate_weights(both, state)
    assert shared_bytes(both) < shared_bytes(policy) + shared_bytes(critic) / 2
    name = "layers.0.self_attn.q_proj.base_layer.weight"
    state[f"critic.base_model.model.model.{name}"] += 1.0
    separate_weights(both, state)
    both.load_state_dict(state)
    layers = [unwrap_model(network).model.get_parameter(name) for network in (policy, critic)]  # type: ignore[union-attr]
    assert torch.equal(layers[0] + 1.0, layers[1])
