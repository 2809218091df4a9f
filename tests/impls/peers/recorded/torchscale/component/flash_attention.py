"""torchscale's choice of a kernel: none where there is no CUDA."""

flash_attn_func = None
