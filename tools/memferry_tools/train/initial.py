"""First weights: every parameter's from its own name, so that the order of making them does not matter."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from .adapters import LAST, add_adapters, name_in_base
from .model import Decoder
from .recipe import Recipe

STD = 0.02
PIECE = 1 << 22  # elements that one generator makes; a constant of the weights, not of the machine


class FirstWeights:
    """Initialises the parameters that a module itself owns.

    The same model and seed give the same bits whether a model is made whole on the CPU or layer by layer from
    the ``meta`` device.

    Parameters
    ----------
    model : Decoder
    seed : int
    """

    def __init__(self, model: Decoder, seed: int) -> None:
        self._seed = seed
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._residual_std = STD / math.sqrt(2 * model.shape.layers)

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Give the module's own parameters, which have memory, their first values."""
        for parameter in module.parameters(recurse=False):
            name = self._names[parameter]
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            elif name.endswith(LAST):
                parameter.zero_()
            else:
                self._fill(parameter, name_in_base(name))

    def _fill(self, parameter: torch.Tensor, name: str) -> None:
        std = self._residual_std if name.endswith(("attention.out.weight", "ffn.down.weight")) else STD
        pieces = parameter.view(-1).split(PIECE)

        def fill(number: int) -> None:
            digest = hashlib.blake2b(f"{self._seed}/{name}/{number}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            with torch.no_grad():
                pieces[number].normal_(0.0, std, generator=generator)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, range(len(pieces))))


def build_model(recipe: Recipe) -> Decoder:
    """The model, with weights that are not its first ones yet."""
    model = Decoder(recipe.shape, checkpointing=recipe.checkpointing)
    if recipe.adapters is not None:
        add_adapters(model, recipe.adapters)
    return model


def model_on_meta(recipe: Recipe) -> Decoder:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return build_model(recipe)


def model_on_cpu(recipe: Recipe) -> Decoder:
    """The model with its first weights, fp32."""
    model = model_on_meta(recipe).to_empty(device="cpu")
    model.tie()
    first = FirstWeights(model, recipe.seed)
    for module in model.modules():
        first(module)
    return model
