# %% [markdown]
# # Listen to the data
#
# This notebook shows what a model learns from: the tokens of a transcript, the features of its
# audio, and what augmentation changes in them. All parts are those of the YAML that trains.

# %%
"""Show a clip of a corpus: its transcript, its features, and what augmentation changes."""

import os
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot

from sbkit import Run
from sbkit.audio.augment import AddNoise, SpeedGroup, speed_perturb
from sbkit.audio.io import write_wav

# Jupyter starts in the folder of the notebook. All paths start at the root of the checkout.
os.chdir(next(f for f in (Path.cwd(), *Path.cwd().parents) if (f / "hparams").is_dir()))
OVERRIDES = {"output_folder": "results/notebook-data"}
CLIP = 7  # its row in the training set

# %% [markdown]
# The run prepares the data that its YAML declares: the default corpus, which it fetches. To see
# data of your own, add your overrides, such as `"data_folder": "/data/cv-corpus-22.0/fr"`.

# %%
run = Run("hparams/ctc.yaml", OVERRIDES)
parts = run.prepare().hparams
row, rate = run.make_loaders().train.dataset[CLIP], run.knobs["sample_rate"]
clip = row["audio"]
run.folder.mkdir(parents=True, exist_ok=True)
write_wav(run.folder / "clip.wav", clip, rate)
print(f"{row['id']}: {len(clip) / rate:.2f} s. Listen to {run.folder / 'clip.wav'}")

# %% [markdown]
# ## Transcript
#
# The text table of the language keeps its letters and drops punctuation and case. The tokenizer
# then splits the text. Here each token is a character, and `▁` is the space.

# %%
tokenizer = parts["tokenizer"]
pieces = [tokenizer.piece(token) for token in tokenizer.encode(row["text"])]
print(f"sentence  {row['sentence']}\ntext      {row['text']}\ntokens    {' '.join(pieces)}")

# %% [markdown]
# ## Features
#
# The model gets the logarithm of the energy in 80 mel bins, every 10 ms.

# %%
audio, samples = torch.from_numpy(clip)[None], torch.tensor([len(clip)])  # (1, S), (1,)
fbank = parts["compute_features"]
features, frames = fbank(audio, samples)  # (1, T, M), (1,)
_, axes = pyplot.subplots(2, figsize=(8, 4), sharex=True, layout="constrained")
axes[0].plot(np.arange(len(clip)) / rate, clip, linewidth=0.3, rasterized=True)
axes[0].set(title="Waveform")
pyplot.rc("image", origin="lower", aspect="auto")
axes[1].imshow(features[0].numpy().T, extent=(0, 0.01 * features.shape[1], 0, features.shape[2]))
axes[1].set(title="Log-mel features", xlabel="seconds", ylabel="mel bin")
pyplot.show()

# %% [markdown]
# ## Augmentation
#
# Training plays each utterance at one of three speeds, which changes tempo and pitch together.
# SpecAugment hides spans of time and of mel bins, so that the model learns to use the context. This
# YAML adds no noise. `AddNoise` takes a folder of recordings, here one of white noise.

# %%
views = {}
for speed in (90, 110):
    played = speed_perturb(audio, samples, [SpeedGroup(speed, 1, len(clip))])
    views[f"Speed {speed} %"] = fbank(*played)[0]
views["Masks of SpecAugment"] = parts["spec_augment"](features, frames)
(run.folder / "noise").mkdir(exist_ok=True)
white = np.random.default_rng(0).normal(scale=1000, size=rate).astype(np.int16)
write_wav(run.folder / "noise/white.wav", white, rate)
add_noise = AddNoise(folder=str(run.folder / "noise"), snr_db=(10, 10), prob=1, sample_rate=rate)
views["White noise, 10 dB below the speech"] = fbank(*add_noise(audio, samples))[0]
_, axes = pyplot.subplots(len(views), figsize=(8, 7), sharex=True, layout="constrained")
for axis, (title, view) in zip(axes, views.items(), strict=True):
    axis.imshow(view[0].numpy().T, extent=(0, 0.01 * view.shape[1], 0, view.shape[2]))
    axis.set(title=title, ylabel="mel bin")
axes[-1].set(xlabel="seconds", xlim=(0, 0.01 * max(view.shape[1] for view in views.values())))
pyplot.show()
