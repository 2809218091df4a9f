"""How tensors get from rank to rank without NCCL: copy engines and ring buffers."""
