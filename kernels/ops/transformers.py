"""Experts of Hugging Face transformers by these operations: `register()`, then `experts_implementation="groupbench"`.

    from groupbench.kernels.ops import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="groupbench")

The experts of Qwen3-MoE, Mixtral and others with SiLU, matrices [G, 2F, H] and no bias are one `moe_layer`. Others,
such as gpt-oss with biases and a gate of its own, are two `grouped_mm` between `permute` and `unpermute`.

gpt-oss's checkpoints have experts in mxfp4. `use_mxfp4` multiplies those, instead of the values that transformers
dequantises when it loads the model:

    transformers.use_mxfp4(model, safetensors.torch.load_file("model.safetensors"))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from groupbench.kernels.four_bit.layer import of_gpt_oss
from groupbench.kernels.ops.layers import moe_layer, permute, unpermute
from groupbench.kernels.ops.products import grouped_mm

NAME = "groupbench"


def register() -> None:
    """Add the experts function `groupbench` to transformers. Raises ImportError without a transformers that has it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


def use_mxfp4(model: Any, tensors: Mapping[str, Tensor], fp8: bool = False) -> int:
    """Let the experts of a model use the mxfp4 weights of its checkpoint, for inference. Return how many layers do.

    Args:
        model: module whose experts have the names of the checkpoint.
        tensors: those of the checkpoint, by name, on the model's device. Layers without mxfp4 stay as they are.
        fp8: quantise activations to e4m3 before each product.
    """
    count = 0
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if f"{prefix}gate_up_proj_blocks" in tensors and f"{prefix}down_proj_blocks" in tensors:
            module.four_bit_experts = of_gpt_oss(tensors, prefix, fp8)
            count += 1
    return count


def experts(
    module: Any,  # the experts of a layer, with transformers' attributes
    hidden_states: Tensor,  # [T, H]
    top_k_index: Tensor,  # [T, k]; from num_experts on: an expert of another rank
    top_k_weights: Tensor,  # [T, k]
) -> Tensor:  # [T, H]
    """Return the weighted sum of each token's experts."""
    four_bit = getattr(module, "four_bit_experts", None)
    if four_bit is not None:
        out: Tensor = four_bit(hidden_states, top_k_index, top_k_weights)
        return out.to(hidden_states.dtype)
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
