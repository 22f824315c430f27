"""Run layers of a transformers model with each implementation of its experts, and print the times in ms.

    python examples/transformers_moe.py --layers 4 --tokens 8192 --batch 64

Weights are random: 4 layers of Qwen3-30B-A3B need about 5 GB. `--tiny` runs on any machine.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from groupbench.kernels.ops import transformers as experts

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", experts.NAME)
QWEN3_30B_A3B = {
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def milliseconds(call: object, device: str, repeats: int) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(repeats + 2):
        begun = time.perf_counter()
        call()  # type: ignore[operator]
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[2:])


def measure(implementation: str, args: argparse.Namespace) -> list[float | None]:
    """Return the times of a prefill, a decoding step without a cache, and a training step."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**(TINY if args.tiny else QWEN3_30B_A3B), num_hidden_layers=args.layers)
    config._experts_implementation = implementation
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    with torch.device(args.device):
        model = Qwen3MoeForCausalLM(config).to(dtype)
        prompt = torch.randint(0, config.vocab_size, (1, args.tokens))
        step = torch.randint(0, config.vocab_size, (args.batch, 1))

    def train() -> None:
        model(prompt, use_cache=False).logits.float().square().mean().backward()
        model.zero_grad()

    def infer(tokens: torch.Tensor) -> None:
        with torch.no_grad():
            model(tokens, use_cache=False, logits_to_keep=1)

    times: list[float | None] = []
    for call in (lambda: infer(prompt), lambda: infer(step), train):
        try:
            times.append(milliseconds(call, args.device, args.repeats))
        except torch.OutOfMemoryError:  # batched_mm copies the matrices of every token
            times.append(None)
            torch.cuda.empty_cache()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="Tokens of the prefill and of the training step.")
    parser.add_argument("--batch", type=int, default=64, help="Sequences of the decoding step.")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="Run a tiny model.")
    args = parser.parse_args()
    experts.register()
    print(f"{'experts':<12} {'prefill':>9} {'decode':>9} {'train':>9}")
    for implementation in IMPLEMENTATIONS:
        times = measure(implementation, args)
        print(f"{implementation:<12}", *(f"{'-' if ms is None else f'{ms:.2f}':>9}" for ms in times), flush=True)


if __name__ == "__main__":
    main()
