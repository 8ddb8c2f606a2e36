"""How the layers of a model share blocks of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from octavo.integers import cdiv


class LayerGroups(NamedTuple):
    """How the layers of a model share blocks. A block has K and V of the layers of a group.

    num_layers  of a group; of the full one maybe others
    windows  of each window group, in tokens
    places   of each layer: its group, 0 for the full one, and its index in that group's blocks. Of a recurrent layer,
             which has no K and V: -1, and its index among these
    """

    num_layers: int
    windows: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def group_layers(
    num_layers: int,
    windows: Sequence[int],
    recurrent: Sequence[int] = (),
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((1, 1), (1, 1)),
) -> LayerGroups:
    """Group layers with these sliding windows; 0: none. Groups have as many layers as there are without a window.

    recurrent: layers that are in no group    sizes: K/V heads and their size, with a window and without. If they
    differ, the layers of a window group take at least as much memory as all layers without a window.

        layers of Gemma 3    s s s s s f s s s s s f s s s s s f     s: slides, f: full
        group                1 1 1 2 2 0 2 3 3 3 4 0 4 4 5 5 5 0

    Layers that are alike, or that all slide, are one group.
    """
    places = {layer: (-1, index) for index, layer in enumerate(recurrent)}
    attending = [layer for layer in range(num_layers) if layer not in places]
    full = [layer for layer in attending if not (windows and windows[layer])]
    if len(full) in (0, len(attending)):
        places |= {layer: (0, index) for index, layer in enumerate(attending)}
        return LayerGroups(len(attending), (), tuple(places[layer] for layer in range(num_layers)))
    places |= {layer: (0, index) for index, layer in enumerate(full)}
    size = len(full)
    if sizes[0] != sizes[1]:
        size = min(cdiv(size * math.prod(sizes[1]), math.prod(sizes[0])), len(attending) - size)
    of_groups: list[int] = []
    for window in sorted({windows[layer] for layer in attending} - {0}):
        sliding = [layer for layer in attending if windows[layer] == window]
        for first in range(0, len(sliding), size):
            of_groups.append(window)
            places |= {layer: (len(of_groups), i) for i, layer in enumerate(sliding[first : first + size])}
    return LayerGroups(size, tuple(of_groups), tuple(places[layer] for layer in range(num_layers)))
