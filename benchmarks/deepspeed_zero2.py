"""DeepSpeed ZeRO-2 with its optimizer offloaded to the CPU, on the model and the text of ``memferry train``.

Takes options of ``memferry train``; writes a short JSON.  One process, one GPU, no launcher.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
    os.environ.setdefault(name, value)
os.environ.setdefault("MASTER_PORT", "29517")

import deepspeed  # noqa: E402  # it reads the environment when it is imported
import torch  # noqa: E402

from memferry_tools.train.data import Batches  # noqa: E402
from memferry_tools.train.initial import model_on_cpu  # noqa: E402
from memferry_tools.train.options import TrainOptions  # noqa: E402
from memferry_tools.train.recipe import Recipe  # noqa: E402
from memferry_tools.train.text import read_text  # noqa: E402
from memferry_tools.train.tokens import tokenise  # noqa: E402

WARM_UP = 3


def main() -> None:
    options = _options(sys.argv[1:])
    tokens = tokenise(read_text(options.data), options.tokenizer)
    recipe = options.settle(emulated=False, vocabulary=tokens.vocabulary)
    batches = Batches(tokens, recipe)
    model = model_on_cpu(recipe).to(device="cuda", dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=_config(recipe))
    torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for step in range(recipe.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for micro in range(recipe.accumulate):
            windows = torch.from_numpy(batches.micro_batch(step, micro)).cuda(non_blocking=True)
            loss = engine(windows[:, :-1], windows[:, 1:])
            engine.backward(loss)
            engine.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    result = {
        "system": f"DeepSpeed {deepspeed.__version__} ZeRO-2, optimizer offloaded, overlap_comm",
        "iteration_s": statistics.median(seconds[WARM_UP:]),
        "device_peak_bytes": torch.cuda.max_memory_reserved(),
        "device_peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "samples": [{"seconds": s, "loss": x} for s, x in zip(seconds, losses, strict=True)],
    }
    assert options.json is not None
    options.json.write_text(json.dumps(result))
    os._exit(0)  # its threads do not end by themselves


def _options(arguments: list[str]) -> TrainOptions:
    words: dict[str, Any] = {}
    rest = iter(arguments)
    for name in rest:
        key = name.removeprefix("--").replace("-", "_")
        words[key] = True if key == "checkpointing" else next(rest)
    for key, kind in (("micro_batch", int), ("seq", int), ("steps", int), ("max_grad_norm", float)):
        if key in words:
            words[key] = kind(words[key])
    return TrainOptions.build(**words)


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
