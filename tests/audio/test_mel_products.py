"""What is exported computes the features that torch computes, without a transform of Fourier."""

import torch
from torch.export import Dim, export

from sbkit.audio.fbank import Fbank, mel_products


def test_where_a_window_has_no_rows_the_fft_stays() -> None:
    assert mel_products(80, 22_050) is None


def test_an_exported_graph_has_no_fft_and_any_length() -> None:
    features, lengths = Fbank().eval(), torch.tensor([16_000, 9_000, 400])
    audio = 1000 * torch.randn(3, 16_000)
    features(audio, lengths)
    free = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    program = export(features, (audio, lengths), dynamic_shapes=free, strict=False)
    assert not [node for node in program.graph.nodes if "fft" in node.name]
    for samples in (561, 2_000, 20_123):
        audio, lengths = 1000 * torch.randn(2, samples), torch.tensor([samples, 400])
        expected, found = features(audio, lengths), program.module()(audio, lengths)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
