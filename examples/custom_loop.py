"""A training loop of your own, offloaded: schedule, clipping, accumulation, evaluation, save and resume.

Run it twice: the second run goes on where the first one ended.  Without a GPU it runs on the emulated device.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import memferry_rt

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("custom-loop-checkpoint"))
parser.add_argument("--device", default="auto")
parser.add_argument("--device-memory", default="1MiB")
options = parser.parse_args()

torch.manual_seed(0)
blocks = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(4)]
model = nn.Sequential(nn.Embedding(16, 32), *blocks, nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
memferry_rt.offload(
    model, optimizer, device=options.device, device_memory=options.device_memory, max_grad_norm=1.0
)


def loss_of(number: int) -> torch.Tensor:
    """Of a batch that its number decides: every token is followed by one three greater."""
    start = torch.randint(16, (4, 1), generator=torch.Generator().manual_seed(number))
    tokens = ((start + 3 * torch.arange(9)) % 16).to(model[0].weight.device)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


first = 0
if (options.folder / "checkpoint.json").exists():
    extra = memferry_rt.load(options.folder, model, optimizer)
    first = extra["step"]
    scheduler.load_state_dict(extra["scheduler"])

for step in range(first, options.steps):
    torch.manual_seed(step)  # dropout is decided by the step, so that no random state need be saved
    for micro_step in range(2):
        (loss_of(2 * step + micro_step) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if (step + 1) % 5 == 0 or step + 1 == options.steps:
        model.eval()
        with torch.no_grad():
            loss = loss_of(1_000_000).item()
        model.train()
        print(f"step {step + 1}: loss {loss:.6f}, gradient norm {optimizer.grad_norm:.6f}")
        extra = {"step": step + 1, "scheduler": scheduler.state_dict()}
        memferry_rt.save(options.folder, model, optimizer, extra=extra)
