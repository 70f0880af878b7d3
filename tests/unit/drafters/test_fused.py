"""The compiled pieces give what the eager ones give, for any number of rows."""

import functools

import pytest
import torch

from slipstream.drafters import fused


def test_compiled_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for the real backend, which would need a C++ compiler and most of a minute."""
    generator = torch.Generator().manual_seed(0)
    pieces = ("rms_norm", "rms_norm_backward", "_turned")
    eager = {name: getattr(fused, name) for name in pieces}
    for name in pieces:
        monkeypatch.setattr(fused, name, eager[name])  # put back at the end
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    fused.compile_pieces()
    for num_rows in (3, 5):
        states, grad = torch.randn(2, num_rows, 8, generator=generator)
        scale, cos = torch.randn(8, generator=generator), torch.randn(num_rows, 1, 8, generator=generator)
        inputs = {
            "rms_norm": (states, scale, 1e-5),
            "rms_norm_backward": (grad, states, scale, torch.rand(num_rows, 1, generator=generator)),
            "_turned": (states[:, None].expand(-1, 2, -1).clone(), cos, 1 - cos),
        }
        for name, given in inputs.items():
            assert getattr(fused, name) is not eager[name]
            torch.testing.assert_close(getattr(fused, name)(*given), eager[name](*given))
