"""The colours of the page and of the figures: the same on paper, on a white screen and on a dark one.

    MODELS[0].light, MODELS[0].dark          # the colour of the first model
    build_ramp("light")[63]                  # the strongest of the 64 levels of a map

Model colours differ in hue and in lightness, so that colour-blind readers and grey prints can distinguish them. A ramp
starts at the colour of the page and grows steadily darker, or on a dark page lighter.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEVELS = 64


class Colour(NamedTuple):
    """A hex colour for a light background and one for a dark background."""

    light: str
    dark: str


MODELS = (
    Colour("#0b62a4", "#62aeea"),
    Colour("#bf4d08", "#ff9a5c"),
    Colour("#00795a", "#46c79e"),
    Colour("#9a4f8f", "#dd9ad2"),
    Colour("#8a6d00", "#e0bf4d"),
    Colour("#4a4fb0", "#a3a8f5"),
    Colour("#6b5b4d", "#bdad9c"),
)
REGIONS = (
    Colour("#3d7dbd", "#6fa8dc"),
    Colour("#c9832b", "#dba25a"),
    Colour("#3d9a78", "#5fbf9b"),
    Colour("#a5639c", "#c88fc0"),
    Colour("#8f8a2c", "#b9b357"),
    Colour("#6c6fc0", "#9799dd"),
    Colour("#b0614f", "#d48c7b"),
    Colour("#4f97a3", "#7cc0cb"),
    Colour("#7d838c", "#a9afb8"),
    Colour("#6f9a3f", "#9bc66b"),
    Colour("#94653a", "#c59a6d"),
    Colour("#2f5f86", "#5f93bd"),
)
TOP = Colour("#d81b60", "#ff5c93")
COMMIT = Colour("#b35900", "#ffb04d")

STOPS = {
    "light": ("#fbfaf7", "#cfe3df", "#83bdc4", "#3f8db4", "#2b5a97", "#231f5c"),
    "dark": ("#17191d", "#1f3654", "#1c6280", "#2f948f", "#8ccb80", "#f6f3b8"),
}


def build_ramp(background: str) -> list[str]:
    """The levels of a map as hex colours, for a `light` or `dark` background.

    The colours are interpolated in OKLab, where equal steps look equal.
    """
    stops = np.array([_to_oklab(stop) for stop in STOPS[background]])
    at = np.linspace(0, len(stops) - 1, LEVELS)
    return [_to_hex(lab) for lab in np.stack([np.interp(at, np.arange(len(stops)), column) for column in stops.T], -1)]


def choose_text_colour(background: str) -> str:
    """Near black or white, whichever has the higher WCAG contrast on a background colour."""
    luminance = float(_to_linear(background) @ (0.2126, 0.7152, 0.0722))
    return "#14161a" if (luminance + 0.05) ** 2 > 1.05 * 0.058 else "#ffffff"


# Björn Ottosson's OKLab: linear sRGB → cone responses → cube roots → lightness and two opponent axes.
_TO_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def _to_linear(colour: str) -> np.ndarray:
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _to_oklab(colour: str) -> np.ndarray:
    lab: np.ndarray = _TO_LAB @ np.cbrt(_TO_CONES @ _to_linear(colour))
    return lab


def _to_hex(lab: np.ndarray) -> str:
    linear = np.linalg.solve(_TO_CONES, np.linalg.solve(_TO_LAB, lab) ** 3).clip(0, 1)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * float(value)):02x}" for value in srgb)
