"""Whisper's encoder with a CTC head, for transformers 5, which has no such class.

`save_pretrained` copies this file beside the weights, so it imports neither sbkit nor anything that
transformers does not need. Clips keep their length: frames that `attention_mask` leaves out change
nothing.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import WhisperConfig, WhisperPreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.whisper.modeling_whisper import WhisperEncoder


class WhisperCTCConfig(WhisperConfig):
    """The sizes of a Whisper; the sizes of its decoder are not used."""

    model_type = "whisper_ctc"
    inputs_to_logits_ratio = 320  # samples of a frame, for chunks and times of the pipeline


class WhisperForCTC(WhisperPreTrainedModel):
    """Compute the scores of tokens: features (B, M, T), mask (B, T) -> logits (B, U, V)."""

    config_class = WhisperCTCConfig

    def __init__(self, config: WhisperCTCConfig) -> None:
        super().__init__(config)
        self.encoder = WhisperEncoder(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size)
        self.post_init()

    def forward(
        self, input_features: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> CausalLMOutput:
        """Encode the frames of the mask, or all; `logits[:, : (frames + 1) // 2]` are valid."""
        if attention_mask is None:
            attention_mask = input_features.new_ones(input_features[:, 0].shape)
        mask = attention_mask[:, : int(attention_mask.sum(1).max())].to(input_features.dtype)
        x = input_features[..., : mask.shape[1]] * mask[:, None]
        x = gelu(self.encoder.conv1(x)) * mask[:, None]
        x = gelu(self.encoder.conv2(x)).transpose(1, 2)
        x = x + self.encoder.embed_positions.weight[: x.shape[1]]
        lowest = torch.finfo(x.dtype).min
        bias = (1 - mask[:, None, None, ::2]) * lowest  # (B, 1, 1, U)
        for layer in self.encoder.layers:
            x = layer(x, bias)
        return CausalLMOutput(logits=self.lm_head(self.encoder.layer_norm(x)))
