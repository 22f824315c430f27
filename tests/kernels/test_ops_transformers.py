"""Tiny models of transformers with groupbench's experts: the logits and gradients of transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="NOT TESTED: experts of transformers. It is not installed")
pytest.importorskip("transformers.integrations.moe", reason="NOT TESTED: this transformers has no experts functions")

from groupbench.kernels.ops import transformers as experts  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "qwen3": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 48}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "layer_types": ["full_attention"] * 2, "pad_token_id": 0}),
}


def logits_and_gradients(name: str, implementation: str, device: torch.device) -> tuple[Any, dict[str, Any]]:
    family, further = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **further)
    config._attn_implementation = "eager"
    config._experts_implementation = implementation
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    logits = model(torch.arange(24, device=device).view(2, 12)).logits
    logits.square().mean().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_logits_and_gradients(name: str, device: torch.device) -> None:
    experts.register()
    logits, gradients = logits_and_gradients(name, experts.NAME, device)
    wanted_logits, wanted = logits_and_gradients(name, "eager", device)
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-3, atol=1e-3)
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=2e-3, atol=2e-3, msg=parameter)
