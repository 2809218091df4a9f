"""Tile shapes as text: what is read from them, what is worth trying, and that kernels with them are right."""

import pytest

from dilabench.kernels.tuning import KERNELS, SHARED_BYTES, TileConfig, candidates, read_tiles


def test_a_text_names_kernels_and_their_shapes():
    assert read_tiles("") == {}
    assert read_tiles("backward_query=64x32x4x2,backward_key=64x128x8x3x168") == {
        "backward_query": TileConfig(64, 32, 4, 2),
        "backward_key": TileConfig(64, 128, 8, 3, max_registers=168),
    }


@pytest.mark.parametrize(
    "text",
    ["64x64x4x2", "sideways=64x64x4x2", "forward=64x64", "forward=64xax4x2", "forward=48x64x4x2", "forward=64x64x3x2"],
)
def test_another_text_is_refused(text):
    with pytest.raises(ValueError, match=r"^tiles '"):
        read_tiles(text)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("backward", [False, True])
def test_candidates_are_distinct_readable_and_fit(head_dim, itemsize, backward):
    found = candidates(head_dim, itemsize, backward)
    assert len(set(found)) == len(found) >= 4
    for text in found:
        ((kernel, config),) = read_tiles(text).items()
        assert kernel in (KERNELS[1:] if backward else KERNELS[:1])
        assert (config.block_m + 2 * config.block_n) * head_dim * itemsize <= SHARED_BYTES


@pytest.mark.slow
def test_kernels_are_right_with_any_of_them(interpreted):
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")
    errors = interpreted("kernels/interpreted_tiles.py")
    assert len(errors) == 3
    assert max(errors.values()) < 5e-6, errors
