"""Everything in the GPU's memory, in plain PyTorch: the floor under every offloaded iteration.

    python -m benchmarks.torch_gpu --preset llama-1b ... --json FILE

Takes options of ``memferry train``; writes a short JSON.  bf16 weights and gradients, fp32 masters, fused AdamW.
"""

from __future__ import annotations

import sys

import torch

from memferry_tools.train.initial import model_on_cpu

from .peer import Peer, options_of


def main() -> None:
    peer = Peer(options_of(sys.argv[1:]))
    recipe = peer.recipe
    model = model_on_cpu(recipe).cuda()
    masters = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
    model.bfloat16()
    weights: list[torch.Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)

    def step(number: int) -> torch.Tensor:
        for micro in range(recipe.accumulate):
            loss: torch.Tensor = model(*peer.windows(number, micro))
            (loss / recipe.accumulate).backward()
        if recipe.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights, recipe.max_grad_norm)
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss

    peer.run(f"PyTorch {torch.__version__}, everything on the GPU", step)


if __name__ == "__main__":
    main()
