# ruff: noqa: N999 (torchscale names it so)
"""The signatures of torchscale's LongNet models: layers with norms before attention and before two linear layers."""

from fairscale.nn import checkpoint_wrapper, wrap  # noqa: F401
from timm.models.layers import drop_path  # noqa: F401
from torch import nn

from torchscale.component.dilated_attention import DilatedAttention


class Layer(nn.Module):
    def __init__(self, args, role):
        super().__init__()
        width, inner = (getattr(args, f"{role}_{size}") for size in ("embed_dim", "ffn_embed_dim"))
        self.is_causal = role == "decoder"
        heads = getattr(args, f"{role}_attention_heads")
        self.self_attn = DilatedAttention(args, width, heads, self_attention=True, subln=args.subln)
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=args.layernorm_eps) for _ in range(2))
        self.ffn = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x):
        normed = self.norms[0](x)
        x = x + self.self_attn(normed, normed, normed, is_causal=self.is_causal)[0]
        return x + self.ffn(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, args, role):
        super().__init__()
        self.layers = nn.ModuleList(Layer(args, role) for _ in range(getattr(args, f"{role}_layers")))
        self.layer_norm = nn.LayerNorm(getattr(args, f"{role}_embed_dim"), eps=args.layernorm_eps)

    def hidden(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class LongNetEncoder(Model):
    def __init__(self, args):
        super().__init__(args, "encoder")

    def forward(self, src_tokens, token_embeddings=None, features_only=False):
        assert src_tokens is None
        assert features_only
        return {"encoder_out": self.hidden(token_embeddings)}


class LongNetDecoder(Model):
    def __init__(self, args):
        super().__init__(args, "decoder")

    def forward(self, prev_output_tokens, token_embeddings=None, features_only=False):
        assert prev_output_tokens.shape == token_embeddings.shape[:2]
        assert features_only
        return self.hidden(token_embeddings), {}
