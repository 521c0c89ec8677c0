"""How kernels that move bytes are spread over multiprocessors, by name: what is tried."""

from __future__ import annotations

from memferry_rt.device_kernels import Spread

READ = {
    **{f"{blocks} blocks": Spread(blocks) for blocks in (2, 4, 8)},
    **{f"{warps} warps": Spread(warps, warps=True) for warps in (64, 132)},
}
WRITTEN = {
    **{f"{blocks} blocks": Spread(blocks) for blocks in (1, 2, 4, 8)},
    **{f"{blocks} blocks, settling": Spread(blocks, settle=True) for blocks in (2, 4)},
    **{f"{warps} warps": Spread(warps, warps=True) for warps in (32, 132)},
    **{f"{warps} warps, settling": Spread(warps, warps=True, settle=True) for warps in (66, 132)},
}
GATHERED = {"engine": None, **{name: READ[name] for name in ("4 blocks", "8 blocks", "132 warps")}}
