"""Which codec each tensor of a model gets: rules by name, number of dimensions and size."""

from __future__ import annotations

import fnmatch
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvd_adaptive.compress.codec import Codec
from hvd_adaptive.compress.parse import parse_codec

# Biases, norms and small tensors: little to gain, much to lose (CGX does the same).
EXEMPTIONS = "ndim<2=none; size<1024=none"

_CONDITION = re.compile(r"(ndim|size)\s*(<=|>=|<|>)\s*(\d+)\s*=(?!=)")
_OPERATORS: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge
}  # fmt: skip


class TensorInfo(NamedTuple):
    """What a policy looks at.

    Attributes:
        name: as in ``model.named_parameters()``.
        shape: of the tensor.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition, and the codec of the tensors that meet it.

    Attributes:
        condition: a pattern of names as in file names (``*``, ``?``, ``[..]``), or ``ndim<2``, ``size>=4096``.
        codec: what they get.
    """

    condition: str
    codec: Codec

    def matches(self, tensor: TensorInfo) -> bool:
        """Returns whether the tensor meets the condition."""
        found = _CONDITION.fullmatch(self.condition + "=")
        if found is None:
            return fnmatch.fnmatchcase(tensor.name, self.condition)
        value = len(tensor.shape) if found[1] == "ndim" else tensor.size
        return _OPERATORS[found[2]](value, int(found[3]))


@dataclass(frozen=True, slots=True)
class Policy:
    """The first rule that matches decides, then the exemptions of biases, norms and small tensors, then the default.

    Attributes:
        default: codec of all other tensors.
        rules: in the order in which they are tried.
    """

    default: Codec
    rules: tuple[Rule, ...] = ()

    @property
    def spec(self) -> str:
        """The policy as text, which `parse_policy` reads."""
        return "; ".join([self.default.spec, *(f"{rule.condition}={rule.codec.spec}" for rule in self.rules)])

    def codec(self, tensor: TensorInfo) -> Codec:
        """Returns the codec of a tensor."""
        for rule in (*self.rules, *_exemptions()):
            if rule.matches(tensor):
                return rule.codec
        return self.default

    def check(self, tensors: Sequence[TensorInfo]) -> None:
        """Refuses a pattern of names that no tensor of the model has.

        Raises:
            ValueError: naming the pattern and some of the names.
        """
        for rule in self.rules:
            if not _is_of_names(rule) or any(rule.matches(tensor) for tensor in tensors):
                continue
            names = [tensor.name for tensor in tensors]
            shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(
                f"compression: no tensor's name matches {rule.condition!r}; the names are {shown}; correct the pattern or leave "
                "the rule out"
            )

    def part_for(self, tensors: Sequence[TensorInfo]) -> Policy:
        """Returns the policy without patterns of names that are none of these tensors'. Their codecs are the same."""
        rules = (r for r in self.rules if not _is_of_names(r) or any(r.matches(tensor) for tensor in tensors))
        return Policy(self.default, tuple(rules))


def parse_policy(text: str) -> Policy:
    """Reads ``CODEC[; CONDITION=CODEC]...``, as in ``maxmin:4; embedding*=maxmin:8; head.weight=none; size<5000=none``.

    Raises:
        ValueError: for a rule without a codec, an unknown codec, or a second default.
    """
    default, *rules = [part.strip() for part in text.split(";")]
    if _CONDITION.match(default):
        raise ValueError(f"policy {text!r}: the codec of all other tensors comes first")
    return Policy(parse_codec(default), tuple(_rule(text, rule) for rule in rules if rule))


def _rule(text: str, rule: str) -> Rule:
    found = _CONDITION.match(rule)
    condition, _, codec = (rule[: found.end() - 1], "=", rule[found.end() :]) if found else rule.partition("=")
    if not condition.strip() or not codec.strip():
        raise ValueError(f"policy {text!r}: a rule is CONDITION=CODEC, got {rule!r}")
    return Rule("".join(condition.split()), parse_codec(codec))


def _is_of_names(rule: Rule) -> bool:
    return not _CONDITION.match(rule.condition + "=")


def _exemptions() -> tuple[Rule, ...]:
    return tuple(_rule(EXEMPTIONS, rule.strip()) for rule in EXEMPTIONS.split(";"))
