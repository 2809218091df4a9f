"""A two-layer transformer with dilated attention that learns to repeat a sequence; trains on a CPU in seconds."""

import torch
from torch import Tensor, nn

from dilabench.attention import MultiheadDilatedAttention

VOCABULARY, WIDTH, LENGTH, PERIOD = 8, 32, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = MultiheadDilatedAttention(
            WIDTH, 4, segment_lengths=(16, 32), dilation_rates=(1, 2), causal=True
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BNE: Tensor) -> Tensor:
        normed = self.before_attention(x_BNE)
        x_BNE = x_BNE + self.attention(normed, normed, normed)
        return x_BNE + self.mlp(self.before_mlp(x_BNE))


class TinyTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, token_ids_BN: Tensor) -> Tensor:
        return self.logits(self.blocks(self.tokens(token_ids_BN) + self.positions))


def train(steps: int = 120) -> list[float]:
    """Cross-entropy of every step; each sequence repeats its first tokens."""
    torch.manual_seed(0)
    model = TinyTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        period = torch.randint(VOCABULARY, (16, PERIOD))
        batch = period.repeat(1, LENGTH // PERIOD)
        loss = nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")  # noqa: T201
