"""The encoder of a SpeechBrain folder: what its hyperparams.yaml builds, of sbkit's parts.

Legend: B utterances, S samples, U frames, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sbkit.inference.formats.traced import WaveformModel
from sbkit.models.asr import AsrModel
from sbkit.text.vocabulary import Vocabulary

SPARE = 2  # frames that rounding a relative length can cost


class WaveformEncoder(nn.Module):
    """Waveforms to log-probabilities, as SpeechBrain's EncoderASR calls an encoder.

    It takes audio between -1 and 1 and relative lengths: (B, S), (B,) -> (B, U', V). Past its end
    an utterance is certainly blank, and there are as many such frames as it takes for SpeechBrain's
    decoder, which rounds the relative length of each, never to cut off a frame that counts. A frame
    whose best token is a special one, which leaves no trace in a text of sbkit, is blank, too.
    """

    def __init__(
        self,
        *,
        model: Sequence[str],
        vocabulary: Vocabulary,
        **parts: nn.Module,
    ) -> None:
        """Put the parts together as a bundle does; ``model`` names those with weights, in order."""
        super().__init__()
        self.compute_features = parts.get("compute_features")  # moves with this module
        self.blank = vocabulary.blank
        self.silent = (vocabulary.unk, vocabulary.bos, vocabulary.eos)
        owned = nn.ModuleList(parts[name] for name in model)
        self.waveform = WaveformModel(AsrModel(model=owned, vocabulary=vocabulary, **parts))

    def forward(self, wavs: Tensor, wav_lens: Tensor) -> Tensor:
        """Score every token at every frame."""
        lengths = (wav_lens * wavs.shape[1]).round().long().cpu()
        log_probs, frames = self.waveform(wavs, lengths)
        more = int(torch.ceil(SPARE / wav_lens.min()))
        padded = nn.functional.pad(log_probs, (0, 0, 0, more))  # (B, U', V)
        past = torch.arange(padded.shape[1]) >= frames.cpu().unsqueeze(1)  # (B, U')
        silent = torch.isin(padded.argmax(-1).cpu(), torch.tensor(self.silent))
        certain = torch.full((padded.shape[2],), -torch.inf, device=padded.device)
        certain[self.blank] = 0.0
        return torch.where((past | silent).unsqueeze(2).to(padded.device), certain, padded)
