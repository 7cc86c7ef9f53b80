"""Random numbers that a script draws for the samples of its batch, for ``run --verify``: a sample's are its own on every rank.

A VAE, a GAN, a diffusion model and stochastic depth draw a row for each sample. Which ones a sample gets depends on the rank's
generator and on the samples before it, so two runs with other shares could not be compared.
"""

from __future__ import annotations

import functools
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_adaptive.wrap.compilers import is_reading

_FUNCTIONS = (
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial",
    "poisson", "binomial", "_standard_gamma", "_sample_dirichlet",
)  # fmt: skip
_METHODS = (
    "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "geometric_", "cauchy_", "bernoulli",
    "multinomial",
)  # fmt: skip
# Losses are computed again with numbers of this package's own, and orders of samples are drawn ahead.
_NOT_THE_SCRIPT = ("hvd_adaptive.", "torch.utils.data.")


class NoiseBySample:
    """Draws each row anew, from the number that a generator gives next and the row's sample.

    That number is of torch's global generator for the CPU. So checkpointed layers draw the same again.

    Args:
        drew: is called when the script draws from a generator of its own.
    """

    def __init__(self, drew: Callable[[], None]) -> None:
        self._drew = drew
        self._samples: list[str] = []
        self._thread = 0

    def begin(self, samples: Sequence[Any]) -> None:
        """A batch of these samples has come to the script: indices of its data set, one for each row."""
        self._samples = [repr(sample) for sample in samples]
        self._thread = threading.get_ident()

    def end(self) -> None:
        """The script is at no batch."""
        self._samples = []

    def replacements(self) -> dict[tuple[Any, str], Any]:
        """Returns what stands in for torch's functions and methods that draw, by owner and name."""
        named = [(torch, name) for name in _FUNCTIONS] + [(Tensor, name) for name in _METHODS]
        return {(owner, name): self._replaced(getattr(owner, name)) for owner, name in named}

    def _replaced(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(draw)
        def draw_(*args: Any, **options: Any) -> Any:
            if is_reading() or sys._getframe(1).f_globals.get("__name__", "").startswith(_NOT_THE_SCRIPT):
                return draw(*args, **options)
            if options.get("generator") is not None:
                self._drew()
            # Checkpointed layers may be computed again in autograd's own thread.
            is_elsewhere = threading.get_ident() != self._thread and torch._C._current_graph_task_id() == -1
            if not self._samples or is_elsewhere:
                return draw(*args, **options)
            before = torch.default_generator.get_state()
            # The script's watchers see this call. What is not of the batch stays as it is.
            result = draw(*args, **options)
            dim = self._dim_of(result)
            if dim is not None:
                # By `data`, as autograd may have kept the result.
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    self._draw_again(draw, args, options, result.data, dim, before)
            return result

        return draw_

    def _dim_of(self, result: Any) -> int | None:
        """Returns the dimension along which a result has a row for each sample; None if it has none."""
        is_plain = type(result) in (Tensor, torch.nn.Parameter) and result.layout == torch.strided
        # Within vmap it is no tensor of its own.
        if not is_plain or result.device.type not in ("cpu", "cuda") or torch._C._functorch.is_functorch_wrapped_tensor(result):
            return None
        dims = [dim for dim, size in enumerate(result.shape) if size == len(self._samples)]
        # Matrices may be noise on weights, which are as long by chance.
        return dims[0] if dims and (dims[0] == 0 or (len(dims) == 1 and result.dim() > 2)) else None

    def _draw_again(
        self, draw: Callable[..., Any], args: Any, options: dict[str, Any], rows: Tensor, dim: int, before: Tensor
    ) -> None:
        """Draws each row for its sample; what follows is drawn as after a single number.

        Args:
            rows: the call's result.
            dim: along which it has the rows.
            before: the state of torch's generator for the CPU before the call.
        """
        options = {name: value for name, value in options.items() if name not in ("generator", "out")}
        after = torch.default_generator.get_state()
        torch.default_generator.set_state(before)
        token = int(torch.randint(2**62, ()))
        after_token = torch.default_generator.get_state()
        generator = torch.default_generator if rows.device.type == "cpu" else torch.cuda.default_generators[rows.device.index]
        try:
            for row, sample in enumerate(self._samples):
                place, part = rows.narrow(dim, row, 1), (dim, row, len(self._samples))
                generator.manual_seed(zlib.crc32(f"{token} {sample}".encode()))
                values = _of_one_row(draw, args, options, part)
                if values is None or values.shape != place.shape:
                    # As long as the batch by chance.
                    after_token = after
                    break
                if not draw.__name__.endswith("_"):
                    place.copy_(values)
        finally:
            generator.manual_seed(token)
            torch.default_generator.set_state(after_token)


def _of_one_row(draw: Callable[..., Any], args: Any, options: dict[str, Any], part: tuple[int, int, int]) -> Tensor | None:
    """Returns one of the rows that a call draws; None if it cannot be drawn by itself.

    Args:
        draw: the function.
        args: its arguments.
        options: and by their names.
        part: the dimension, the row, and the number of rows.
    """
    dim, row, count = part

    def of_one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.narrow(dim, row, 1) if value.shape[dim : dim + 1] == (count,) else value
        if isinstance(value, (tuple, list)) and list(value[dim : dim + 1]) == [count]:
            return (*value[:dim], 1, *value[dim + 1 :])
        return value

    if draw.__name__ in ("rand", "randn") and args and isinstance(args[0], int):
        args = (args,)
    try:
        return draw(*map(of_one, args), **{name: of_one(value) for name, value in options.items()})
    except RuntimeError:
        # Some depend on each other, as multinomial's without replacement.
        return None
