"""Audio: files, resampling, segments, codes, features and augmentation.

Names are imported on first use: reading audio files must not import torch.
"""

from typing import TYPE_CHECKING

from sbkit.base.imports import lazy_names

if TYPE_CHECKING:
    from sbkit.audio.augment import AddNoise as AddNoise
    from sbkit.audio.augment import AddReverb as AddReverb
    from sbkit.audio.augment import Compose as Compose
    from sbkit.audio.augment import SpecAugment as SpecAugment
    from sbkit.audio.augment import SpeedGroup as SpeedGroup
    from sbkit.audio.augment import speed_perturb as speed_perturb
    from sbkit.audio.containers import AudioError as AudioError
    from sbkit.audio.draws import draw_uniform as draw_uniform
    from sbkit.audio.fbank import Fbank as Fbank
    from sbkit.audio.io import read_audio as read_audio
    from sbkit.audio.io import stream_audio as stream_audio
    from sbkit.audio.io import write_wav as write_wav

__getattr__, __dir__ = lazy_names(
    "sbkit.audio",
    **dict.fromkeys(("AddNoise", "AddReverb", "Compose", "SpecAugment"), "augment"),
    **dict.fromkeys(("SpeedGroup", "speed_perturb"), "augment"),
    **dict.fromkeys(("read_audio", "stream_audio", "write_wav"), "io"),
    AudioError="containers",
    draw_uniform="draws",
    Fbank="fbank",
)
