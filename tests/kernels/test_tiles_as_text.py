"""Tile shapes as text: what is read from them, and that kernels with them are right."""

import pytest

from dilabench.kernels.tuning import TileConfig, read_tiles


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


@pytest.mark.slow
def test_kernels_are_right_with_any_of_them(interpreted):
    pytest.importorskip("triton", reason="Triton is not installed: its interpreter runs these kernels on the CPU")
    errors = interpreted("kernels/interpreted_tiles.py")
    assert len(errors) == 3
    assert max(errors.values()) < 5e-6, errors
