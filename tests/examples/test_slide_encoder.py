"""The example of docs/how-to/run-gigapath.md loads torchscale's state dict and computes what torchscale computes."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
# 12 layers of torchscale's LongNetEncoder in float64, with Prov-GigaPath's 16 heads and scaled segments.
GOLDEN = HERE.parent / "golden" / "torchscale" / "encoder_12_layers.npz"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(HERE / "slide_encoder.py"))


def test_twelve_layers_are_torchscales(example: dict[str, Any]) -> None:
    with np.load(GOLDEN) as file:
        saved = {key: torch.from_numpy(file[key]) for key in file.files if key != "config"}
        config = json.loads(str(file["config"]))
    args = SimpleNamespace(
        **{
            **vars(example["GIGAPATH"]),
            "segment_length": config["segment_lengths"],
            "dilated_ratio": config["dilation_rates"],
        }
    )
    heads = config["num_heads"]
    sizes = {"embed_dim": heads * config["head_dim"], "ffn_dim": config["ffn_dim"], "num_heads": heads}
    encoder = example["SlideEncoder"](args, **sizes, depth=config["layers"]).double()
    state = {key.removeprefix("weight."): value for key, value in saved.items() if key.startswith("weight.")}
    encoder.load_state_dict(state)
    x = saved["x"].requires_grad_()
    y = encoder(x)
    torch.testing.assert_close(y, saved["y"], rtol=0, atol=1e-12)
    (dx,) = torch.autograd.grad(y, x, saved["dy"])
    torch.testing.assert_close(dx, saved["grad.x"], rtol=1e-12, atol=1e-12)


def test_at_full_size_it_has_the_parameters_of_gigapaths(example: dict[str, Any]) -> None:
    with torch.device("meta"):
        encoder = example["SlideEncoder"]()
    # What Prov-GigaPath's own demo prints for its LongNet (demo/run_gigapath.ipynb).
    assert sum(one.numel() for one in encoder.parameters()) == 85_148_160
