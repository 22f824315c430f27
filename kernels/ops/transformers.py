"""Experts of Hugging Face transformers by these operations: `register()`, then `experts_implementation="groupbench"`.

    from groupbench.kernels.ops import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="groupbench")

The experts of Qwen3-MoE, Mixtral and others with SiLU, matrices [G, 2F, H] and no bias are one `moe_layer`. Others,
such as gpt-oss with biases and a gate of its own, are two `grouped_mm` between `permute` and `unpermute`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from groupbench.kernels.ops.layers import moe_layer, permute, unpermute
from groupbench.kernels.ops.products import grouped_mm

NAME = "groupbench"


def register() -> None:
    """Add the experts function `groupbench` to transformers. Raises ImportError without a transformers that has it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def experts(
    module: Any,  # the experts of a layer, with transformers' attributes
    hidden_states: Tensor,  # [T, H]
    top_k_index: Tensor,  # [T, k]; from num_experts on: an expert of another rank
    top_k_weights: Tensor,  # [T, k]
) -> Tensor:  # [T, H]
    """Return the weighted sum of each token's experts."""
    if one_layer(module):
        return moe_layer(hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj)
    rows, offs, position = permute(hidden_states, top_k_index, module.num_experts)
    up, up_bias = ("gate_up_proj", "gate_up_proj_bias") if module.has_gate else ("up_proj", "up_proj_bias")
    both = _linear(module, rows, offs, up, up_bias)
    act = module._apply_gate(both) if module.has_gate else module.act_fn(both)
    y = _linear(module, act, offs, "down_proj", "down_proj_bias")
    return unpermute(y, position, top_k_weights).to(hidden_states.dtype)


def one_layer(module: Any) -> bool:
    """Return whether a module's experts are those of `moe_layer`."""
    plain_gate = getattr(type(module)._apply_gate, "__name__", "") == "_default_apply_gate"
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    return bool(module.has_gate and plain_gate and silu and not module.has_bias and not module.is_transposed)


def _linear(module: Any, rows: Tensor, offs: Tensor, weight: str, bias: str) -> Tensor:
    w = getattr(module, weight)
    b = getattr(module, bias) if module.has_bias else None
    return grouped_mm(rows, w if module.is_transposed else w.transpose(1, 2), offs, bias=b)
