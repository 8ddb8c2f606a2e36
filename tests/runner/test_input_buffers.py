"""What a plan's numbers become for the device."""

from __future__ import annotations

import numpy as np

from octavo.core.plan import RowSetup
from octavo.kernels.row_state import FIRST_STOP_ID, MAX_STOP_IDS
from octavo.params.sampling_params import SamplingParams
from octavo.runner.input_buffers import pack_setups


def test_a_row_knows_the_first_of_too_many_stop_tokens_whatever_their_order() -> None:
    """Sets that are equal may list their members in different orders, on a rank that has decoded the plan, too."""
    stops = list(range(0, 64 * (MAX_STOP_IDS + 2), 64))
    sets = frozenset(stops), frozenset(reversed(stops))
    assert sets[0] == sets[1] and list(sets[0]) != list(sets[1])
    setups = [RowSetup(0, SamplingParams(), 5, 0, each, 3, None) for each in sets]
    first, second = (pack_setups([setup], {})[1] for setup in setups)
    assert np.array_equal(first, second)
    assert first[FIRST_STOP_ID:].tolist() == stops[:MAX_STOP_IDS]
