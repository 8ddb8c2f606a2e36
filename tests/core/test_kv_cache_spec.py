"""A `KVCacheSpec` has the shape and the bytes of the tensors that the engine makes from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo import LLM
from octavo.core.kv_cache_spec import ITEMSIZE, KVCacheSpec
from octavo.errors import ParameterError
from tests.models.tiny import HYBRIDS, KINDS, make_tiny_checkpoint, read_spec

NUM_BLOCKS = 70


@pytest.fixture(scope="module", params=[*KINDS, *HYBRIDS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(request.param, tmp_path_factory.mktemp("spec") / request.param))


@pytest.mark.parametrize("dtype", [dtype for dtype in ITEMSIZE if not dtype.startswith("float8")])  # a GPU's
def test_bytes_equal_the_engines_tensors(model: str, dtype: str) -> None:
    with LLM(
        model,
        device="cpu",
        **({"dtype": "float32", "kv_cache_dtype": dtype} if dtype == "int8" else {"dtype": dtype}),
        skip_tokenizer_init=True,
        block_size=4,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=-1,
        swap_space=1.0,
    ) as llm:
        config, runner = llm.config, llm.engine.executor.runner
        spec = config.kv
        assert spec == KVCacheSpec.of(read_spec(Path(model)), 4, dtype)
        assert config.dtype == ("float32" if dtype == "int8" else dtype)
        for kv, num_blocks in (
            (runner.state.kv, config.num_blocks),
            (runner.state.swapper.host_kv, config.num_host_blocks),
        ):
            assert num_blocks == NUM_BLOCKS
            assert (kv.dtype, tuple(kv.shape)) == (getattr(torch, dtype), spec.pool_shape(num_blocks))
            assert kv.nbytes == spec.pool_bytes(num_blocks)
            assert kv[1].nbytes == spec.bytes_per_block
            assert kv[1, ..., 0, :].nbytes == spec.bytes_per_token
            assert spec.num_blocks(kv.nbytes) == spec.num_blocks(kv.nbytes + spec.bytes_per_block - 1) == num_blocks
        assert config.kv_bytes == runner.state.kv.nbytes


def test_itemsizes_are_torchs() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE


@pytest.mark.parametrize("num_blocks", [3, 40, 97, 500])
def test_longest_is_the_inverse_of_the_blocks_of_a_sequence(num_blocks: int) -> None:
    kv = KVCacheSpec(2, 1, 8, 16, "float32", windows=(64, 600))
    longest = kv.longest(num_blocks)
    assert kv.blocks_of(longest, kv.max_chunk) <= num_blocks < kv.blocks_of(longest + 1, kv.max_chunk)
    assert replace(kv, windows=()).longest(num_blocks) == 16 * num_blocks


@pytest.mark.parametrize("windows", [(), (64, 600)])
def test_a_block_of_two_sizes_of_heads_has_room_for_the_larger_group(windows: tuple[int, ...]) -> None:
    """Two layers of 1 head of 32 take a row of 128 numbers, three of 2 heads of 16 one of 192."""
    kv = KVCacheSpec(3, 2, 16, 8, "float32", windows=windows, full=(2, 1, 32))
    assert kv.block_shape == (1, 1, 1, 8, 192 if windows else 128 + 192)
    assert kv.num_places == 2 + 3 * (len(windows) or 1)
    assert replace(kv, full=None).num_places == 3 * (1 + len(windows))
    wide = replace(kv, full=(2, 1, 64))
    assert (wide.layer_bytes(0), wide.layer_bytes(64)) == (4 * 2 * 64, 4 * 2 * 2 * 16)


def test_float8_is_refused_for_two_sizes_of_heads(tmp_path: Path) -> None:
    spec = read_spec(make_tiny_checkpoint("gemma4", tmp_path))
    with pytest.raises(ParameterError, match="float8_e5m2 is not supported for K/V heads of two sizes; choose int8"):
        KVCacheSpec.of(spec, 4, "float8_e5m2")
