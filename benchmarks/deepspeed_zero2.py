"""DeepSpeed ZeRO-2 with its optimizer offloaded to the CPU, on the model and the text of ``memferry train``.

    python -m benchmarks.deepspeed_zero2 --preset llama-1b ... --json FILE

Takes options of ``memferry train``; writes a short JSON.  One process and one GPU, or several under ``torchrun``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
if _here > 1:  # the launcher has set it to 1
    os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)) // _here)
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29517")

import deepspeed  # noqa: E402  # it reads the environment when it is imported
import torch  # noqa: E402

from memferry_tools.train.initial import model_on_cpu  # noqa: E402
from memferry_tools.train.recipe import Recipe  # noqa: E402

from .peer import Peer, options_of  # noqa: E402


def main() -> None:
    peer = Peer(options_of(sys.argv[1:]))
    recipe = peer.recipe
    model = model_on_cpu(recipe).to(device="cuda", dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=_config(recipe))

    def step(number: int) -> torch.Tensor:
        for micro in range(recipe.accumulate):
            loss: torch.Tensor = engine(*peer.windows(number, micro))
            engine.backward(loss)
            engine.step()
        return loss

    peer.run(f"DeepSpeed {deepspeed.__version__} ZeRO-2, optimizer offloaded, overlap_comm", step)
    os._exit(0)  # its threads do not end by themselves


def _config(recipe: Recipe) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.accumulate,
        "bf16": {"enabled": True},
        "gradient_clipping": recipe.max_grad_norm or 0.0,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": recipe.lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": recipe.weight_decay},
        },
    }


if __name__ == "__main__":
    main()
