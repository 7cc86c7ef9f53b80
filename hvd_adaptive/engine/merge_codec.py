"""What merges are encoded with where nobody has said so: a codec of 4 bits, and one of 2 where even that takes long."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from hvd_adaptive.comm.protocols import Collectives
from hvd_adaptive.config import Config
from hvd_adaptive.engine.optimizer_state import learns_from_short_rounds
from hvd_adaptive.engine.shards import local
from hvd_adaptive.exchange.codec_choice import chosen_codec
from hvd_adaptive.exchange.compressed import CompressedSum

log = logging.getLogger(__name__)

# It lost nothing in training that was measured.
SLOW_LINK_CODEC = "maxmin:4"
# It loses a little, which merges that are twice as frequent more than make up for:
# benchmarks/records/2026-11-30-two-bits.md.
NARROW_LINK_CODEC = "normal:2"


class MergeCodec:
    """The codec of merges. Construction is COLLECTIVE where it is to be chosen: by a trial.

    Args:
        config: the rules, completed but for the codec.
        optimizer: of the parameters.
        parameters: those that are merged.
        transport: the world.

    Attributes:
        config: the rules, with the codec that merges have now.
        can_narrow: they can have fewer bits than now.
    """

    def __init__(self, config: Config, optimizer: Optimizer, parameters: Sequence[Tensor], transport: Collectives) -> None:
        self.can_narrow, self._speaks = False, transport.speaks
        self.config = config
        if config.compression != "auto":
            return
        codec = "none"
        # Rows of sparse parameters, and what must repeat, are sent as they are.
        adapts = learns_from_short_rounds(config, optimizer) and config.sparse_merge != "always"
        if adapts and parameters and transport.world_size > 1 and not config.repeatable:
            num_elements = sum(local(p).numel() for p in parameters)
            codec = chosen_codec(SLOW_LINK_CODEC, config, transport, device=parameters[0].device, num_elements=num_elements)
        self.can_narrow = codec != "none" and config.error_feedback
        self.config = dataclasses.replace(config, compression=codec)

    def narrow(self, compressed: CompressedSum | None) -> None:
        """Takes the codec for a narrow link from now on, unless the user chose one. COLLECTIVE, while nothing is on the way."""
        if not self.can_narrow or compressed is None:
            return
        self.can_narrow = False
        compressed.set_codec(NARROW_LINK_CODEC)
        self.config = dataclasses.replace(self.config, compression=NARROW_LINK_CODEC)
        if self._speaks:
            log.warning(
                "compression: merges are encoded as %s from here on, as they take long as %s. Set compression %r to keep that",
                NARROW_LINK_CODEC, SLOW_LINK_CODEC, SLOW_LINK_CODEC,
            )  # fmt: skip
