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
    "poisson",
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
            if not self._samples or threading.get_ident() != self._thread:
                return draw(*args, **options)
            before = torch.default_generator.get_state()
            # The script's watchers see this call. What is not of the batch stays as it is.
            result = draw(*args, **options)
            if self._is_of_batch(result):
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    self._draw_again(draw, args, options, result.detach(), before)
            return result

        return draw_

    def _is_of_batch(self, result: Any) -> bool:
        return (
            type(result) in (Tensor, torch.nn.Parameter)
            and result.shape[:1] == (len(self._samples),)
            and result.layout == torch.strided
            and result.device.type in ("cpu", "cuda")
            # Within vmap it is no tensor of its own.
            and not torch._C._functorch.is_functorch_wrapped_tensor(result)
        )

    def _draw_again(self, draw: Callable[..., Any], args: Any, options: dict[str, Any], rows: Tensor, before: Tensor) -> None:
        """Draws each row for its sample; what follows is drawn as after a single number.

        Args:
            rows: the call's result.
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
                part = slice(row, row + 1)
                generator.manual_seed(zlib.crc32(f"{token} {sample}".encode()))
                own_args, own_options = _of_one_row(draw.__name__, args, options, part, len(self._samples))
                values = draw(*own_args, **own_options)
                if values.shape != rows[part].shape:
                    # As long as the batch by chance.
                    after_token = after
                    break
                if not draw.__name__.endswith("_"):
                    rows[part] = values
        finally:
            generator.manual_seed(token)
            torch.default_generator.set_state(after_token)


def _of_one_row(name: str, args: Any, options: dict[str, Any], part: slice, count: int) -> tuple[list[Any], dict[str, Any]]:
    """Returns a call's arguments for one of the rows that it draws."""

    def of_one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[part] if value.shape[:1] == (count,) else value
        return (1, *value[1:]) if isinstance(value, (tuple, list)) else value

    if name in ("rand", "randn") and args and isinstance(args[0], int):
        args = (args,)
    return [of_one(value) for value in args], {key: of_one(value) for key, value in options.items()}
