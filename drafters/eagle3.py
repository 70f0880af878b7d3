"""The EAGLE-3 draft head (2503.01840), and with two flags the EAGLE-3.1 head (2605.09992).

The module that trains is the module that decodes: `train.ttt` unrolls its pieces over packed
rows, `forward` runs the same pieces over a cache.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from slipstream.drafters.config import DraftGeometry, Init
from slipstream.drafters.layers import AttentionCache, DraftLayer, Rotary

INIT_STD = 0.02


class Eagle3Head(nn.Module):
    """fc over the captured states, decoder layers, norm, and a head on the draft vocabulary.

    The first layer is `midlayer`, as in published EAGLE-3 heads; `layers` holds those above it
    under their numbers. The embedding is the target's and stays outside, as in the serving engines.
    """

    def __init__(self, geometry: DraftGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        if geometry.norm_before_fc:
            self.input_norm = nn.RMSNorm(geometry.fc_width, eps=eps)
        if geometry.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(hidden, eps=eps) for _ in geometry.aux_layers)
        self.fc = nn.Linear(geometry.fc_width, hidden, bias=False)
        self.midlayer = DraftLayer(geometry, is_first=True)
        self.layers = nn.ModuleDict(
            {str(i): DraftLayer(geometry, is_first=False) for i in range(1, geometry.num_layers)}
        )
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, geometry.draft_vocab_size, bias=False)
        self.rotary = Rotary(geometry)

    def decoder_layers(self) -> list[DraftLayer]:
        """The layers in order."""
        return [self.midlayer, *cast(Iterable[DraftLayer], self.layers.values())]

    def fc_input(self, aux_RLD: Tensor) -> Tensor:
        """Captured states [..., L, D], normed as the flags say, to what `fc` reads [..., L*D]."""
        if self.geometry.fc_norm:
            normed = [norm(aux_RLD[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            aux_RLD = torch.stack(normed, dim=-2)
        wide = aux_RLD.flatten(-2)
        if self.geometry.norm_before_fc:
            wide = self.input_norm(wide)
        return wide

    def fuse(self, aux_RLD: Tensor) -> Tensor:
        """Captured states [..., L, D] to the hidden state of step 0 [..., D]."""
        hidden: Tensor = self.fc(self.fc_input(aux_RLD))
        return hidden

    def carried(self, layer_out_RD: Tensor) -> Tensor:
        """Layer output to the state carried to the next draft step."""
        carried: Tensor = self.norm(layer_out_RD) if self.geometry.norm_output else layer_out_RD
        return carried

    def finish(self, layer_out_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Layer output to (state carried to the next draft step, state the head reads)."""
        final = self.norm(layer_out_RD)
        return (final if self.geometry.norm_output else layer_out_RD), final

    def logits(self, final_RD: Tensor) -> Tensor:
        """[..., D] to logits over the draft vocabulary [..., W]."""
        out: Tensor = self.lm_head(final_RD)
        return out

    def forward(
        self,
        embed_BTD: Tensor,
        hidden_BTD: Tensor,
        position_BT: Tensor,
        cache: AttentionCache,
        visible_TS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs T new rows over the cache, which takes their keys and values.

        Args:
            embed_BTD: embedding of the token after each row.
            hidden_BTD: fused target states, or the carried state of the row before.
            position_BT: rotary positions.
            cache: what this head has seen of the same sequences.
            visible_TS: bool; which cached rows, these included, each row sees; None: all before it.

        Returns:
            Carried and final states, each [B, T, D].
        """
        batch_size, num_new = position_BT.shape
        state_RD, embed_RD = hidden_BTD.flatten(0, 1), embed_BTD.flatten(0, 1)
        every_row = torch.arange(len(state_RD), device=state_RD.device)
        for i, layer in enumerate(self.decoder_layers()):
            projected = layer.project("qkv", state_RD, layer.embedding_shares(embed_RD), every_row)
            query, key, value = (x.unflatten(0, (batch_size, num_new)) for x in projected)
            query, key = self.rotary(query, position_BT), self.rotary(key, position_BT)
            attended = cache.attend(i, query, key, value, visible_TS)
            state_RD = layer.finish(state_RD, attended.flatten(0, 1))
        cache.advance(num_new)
        return self.finish(state_RD.unflatten(0, (batch_size, num_new)))

    @torch.no_grad()
    def initialise(self, init: Init, *, lm_head_WD: Tensor, norm_D: Tensor, seed: int) -> None:
        """Sets the first weights, the same on every rank.

        Args:
            init: see `Init`.
            lm_head_WD: the target's head rows of the draft vocabulary.
            norm_D: the target's final norm.
            seed: of the random part.
        """
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                noise = torch.empty(module.weight.shape).normal_(0, INIT_STD, generator=generator)
                module.weight.copy_(noise)
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
        if init is not Init.random:
            hidden = self.geometry.hidden_size
            self.lm_head.weight.copy_(lm_head_WD)
            self.norm.weight.copy_(norm_D)
            self.fc.weight.zero_()
            self.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
