"""Messages between ranks without NCCL: copy engines and ring buffers."""
