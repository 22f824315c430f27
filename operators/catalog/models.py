"""Mixture-of-experts models as published, with serving and training traffic.

Sizes come from each model's config.json, whose source is named with it. The rank count is our choice: one rank's
weights fit on a GPU with 80 GB. A rank has the first experts in the drawn order; the row count varies with the routing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """One model's expert layer.

    Attributes:
        experts, k: Number of experts in total, and per token.
        H, F: Hidden size, expert size.
        ranks: Number of ranks; each has experts / ranks of the experts.
        source: Page that publishes the sizes.
    """

    name: str
    experts: int
    k: int
    H: int
    F: int
    ranks: int
    source: str

    @property
    def local(self) -> int:
        """Experts on one rank."""
        return self.experts // self.ranks


MODELS = (
    Model("dsv3", 256, 8, 7168, 2048, 32, "huggingface.co/deepseek-ai/DeepSeek-V3"),
    Model("kimi_k2", 384, 8, 7168, 2048, 48, "huggingface.co/moonshotai/Kimi-K2-Instruct"),
    Model("qwen3_30b", 128, 8, 2048, 768, 1, "huggingface.co/Qwen/Qwen3-30B-A3B"),
    Model("qwen3_235b", 128, 8, 4096, 1536, 8, "huggingface.co/Qwen/Qwen3-235B-A22B"),
    Model("gptoss20b", 32, 4, 2880, 2880, 1, "huggingface.co/openai/gpt-oss-20b"),
    Model("gptoss120b", 128, 4, 2880, 2880, 4, "huggingface.co/openai/gpt-oss-120b"),
    Model("mixtral8x7b", 8, 2, 4096, 14336, 1, "huggingface.co/mistralai/Mixtral-8x7B-v0.1"),
    Model("llama4_scout", 16, 1, 5120, 8192, 2, "huggingface.co/meta-llama/Llama-4-Scout-17B-16E"),
    Model("llama4_mav", 128, 1, 5120, 8192, 16, "huggingface.co/meta-llama/Llama-4-Maverick-17B-128E"),
)

FOUR_BIT = {
    Model("gptoss20b", 32, 4, 2880, 2880, 1, "huggingface.co/openai/gpt-oss-20b"): "mxfp4",
    Model("gptoss120b", 128, 4, 2880, 2880, 1, "huggingface.co/openai/gpt-oss-120b"): "mxfp4",
    Model("dsv4_flash", 256, 6, 4096, 2048, 4, "huggingface.co/deepseek-ai/DeepSeek-V4-Flash"): "mxfp4",
    Model("dsv4_pro", 384, 6, 7168, 3072, 8, "huggingface.co/deepseek-ai/DeepSeek-V4-Pro"): "mxfp4",
    Model("kimi_k3", 896, 16, 3584, 3072, 16, "huggingface.co/moonshotai/Kimi-K3"): "mxfp4",
    Model("kimi_k2", 384, 8, 7168, 2048, 16, "huggingface.co/moonshotai/Kimi-K2-Thinking"): "int4(32)",
}
"""Models whose experts are served with four-bit weights, and the format."""


@dataclass(frozen=True)
class Phase:
    """Tokens per rank in one step, and how they are routed to experts (routing.py)."""

    tokens: int
    routing: str


PHASES = {
    "decode": Phase(128, "zipf(0.8)"),
    "prefill": Phase(4096, "zipf(0.8)"),
    "training": Phase(4096, "uniform(0.7,1.3)"),  # balanced by a loss or by biases
}
"""Phases by suite name. Loads are skewed in serving and nearly balanced in training; the exponents are our choice."""

SWEEP_TOKENS = tuple(2**i for i in range(17))
"""Numbers of tokens in suite sweep_batch: 1 to 65,536."""

SWEEP_SKEW = ("balanced", "multinomial", *(f"zipf({s / 10:g})" for s in range(2, 21, 3)))
