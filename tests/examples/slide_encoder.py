"""Prov-GigaPath's slide encoder in one file: the layers of torchscale's LongNet, with the names of its state dict."""

from types import SimpleNamespace

from torch import Tensor, nn

from dilabench.compat.torchscale import DilatedAttention

GIGAPATH = SimpleNamespace(
    segment_length=[1024, 5792, 32768, 185363, 1048576],
    dilated_ratio=[1, 2, 4, 8, 16],
    multiway=False,
    xpos_rel_pos=False,
    xpos_scale_base=512,
    layernorm_eps=1e-5,
)


class FeedForward(nn.Module):
    def __init__(self, embed_dim: int, ffn_dim: int, eps: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.ffn_layernorm = nn.LayerNorm(ffn_dim, eps=eps)

    def forward(self, x_BNE: Tensor) -> Tensor:
        return self.fc2(self.ffn_layernorm(nn.functional.gelu(self.fc1(x_BNE))))


class Layer(nn.Module):
    def __init__(self, args: SimpleNamespace, embed_dim: int, ffn_dim: int, num_heads: int) -> None:
        super().__init__()
        self.self_attn = DilatedAttention(args, embed_dim, num_heads, self_attention=True, subln=True)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim, eps=args.layernorm_eps)
        self.ffn = FeedForward(embed_dim, ffn_dim, args.layernorm_eps)
        self.final_layer_norm = nn.LayerNorm(embed_dim, eps=args.layernorm_eps)

    def forward(self, x_BNE: Tensor) -> Tensor:
        normed = self.self_attn_layer_norm(x_BNE)
        x_BNE = x_BNE + self.self_attn(normed, normed, normed)[0]
        return x_BNE + self.ffn(self.final_layer_norm(x_BNE))


class SlideEncoder(nn.Module):
    def __init__(
        self,
        args: SimpleNamespace = GIGAPATH,
        embed_dim: int = 768,
        ffn_dim: int = 3072,
        num_heads: int = 16,
        depth: int = 12,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(args, embed_dim, ffn_dim, num_heads) for _ in range(depth))
        self.layer_norm = nn.LayerNorm(embed_dim, eps=args.layernorm_eps)

    def forward(self, x_BNE: Tensor) -> Tensor:
        for layer in self.layers:
            x_BNE = layer(x_BNE)
        return self.layer_norm(x_BNE)
