"""Images without a download: letters and digits in the fonts that come with matplotlib, turned, moved, scaled and noisy."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from digits import Residual

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSerif",
    "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmss10", "cmtt10", "cmr10",
)  # fmt: skip
# Pixels of an image, and of the drawing that it is a view of.
_SIZE, _DRAWN = 16, 48


def letters(num_samples: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Returns images, fp32, shape (num_samples, 1, 16, 16), and the place of each one's character, int64."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [ImageFont.truetype(str(folder / f"{name}.ttf"), 32) for name in _FONTS]
    drawn = torch.stack([_drawn(character, font) for font in fonts for character in CHARACTERS])
    drawn = F.avg_pool2d(drawn.unsqueeze(1), 3, stride=1, padding=1)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(fonts), (num_samples,), generator=generator) * len(CHARACTERS)
    labels = torch.randint(len(CHARACTERS), (num_samples,), generator=generator)
    # Twenty degrees, a fifth of the size, a seventh of the half width, and noise.
    turned, scaled, down, right = (torch.rand(4, num_samples, generator=generator) * 2 - 1) * torch.tensor(
        [[0.35], [0.2], [0.15], [0.15]]
    )
    along, across = (0.62 * (1 + scaled) * part for part in (turned.cos(), turned.sin()))
    views = torch.stack((along, -across, right, across, along, down), 1).view(-1, 2, 3)
    images = torch.cat([
        F.grid_sample(drawn[some], F.affine_grid(view, [len(some), 1, _SIZE, _SIZE], align_corners=False), align_corners=False)
        for some, view in zip((chosen + labels).split(2048), views.split(2048), strict=True)
    ])
    return images + 0.2 * torch.randn(images.shape, generator=generator), labels


def letters_resnet(*, batch_norm: bool) -> nn.Module:
    """Images (batch, 1, 16, 16) -> logits (batch, 62), of 0.21 million parameters."""
    width = 64
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), Residual(width), nn.MaxPool2d(2), Residual(width),
        nn.Flatten(), nn.Linear(width * (_SIZE // 4) ** 2, len(CHARACTERS)),
    )  # fmt: skip
    for block in model if batch_norm else ():
        if isinstance(block, Residual):
            block.layers[1], block.layers[4] = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
    return model


def _drawn(character: str, font: ImageFont.FreeTypeFont) -> Tensor:
    image = Image.new("L", (_DRAWN, _DRAWN))
    ImageDraw.Draw(image).text((_DRAWN // 2, 36), character, fill=255, font=font, anchor="ms")
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(_DRAWN, _DRAWN) / 255
