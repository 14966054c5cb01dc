import torch
from my_models import Encoder
from torch import Tensor


class LiveEncoder(Encoder):
    chunk_frames = 16

    def start(self) -> dict[str, Tensor]:
        zeros = torch.zeros(1, 1, self.lstm.hidden_size)
        return {"hidden": zeros, "cell": zeros}

    def forward_chunk(
        self, x: Tensor, lengths: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        before = (state["hidden"].transpose(0, 1), state["cell"].transpose(0, 1))
        states, (hidden, cell) = self.lstm(x, before)
        return states, lengths, {"hidden": hidden.transpose(0, 1), "cell": cell.transpose(0, 1)}
