# %% [markdown]
# # Look at posteriors
#
# With this notebook you train for ten epochs, look at the probability of each token over time, and
# align a transcript to its audio. The training takes two minutes on two cores.

# %%
"""Train for ten epochs, and show posteriors and an alignment."""

import os
from pathlib import Path

import numpy as np
from matplotlib import pyplot

from sbkit import Run, Transcriber
from sbkit.decoding.words import WordAligner

# Jupyter starts in the folder of the notebook. All paths start at the root of the checkout.
os.chdir(next(f for f in (Path.cwd(), *Path.cwd().parents) if (f / "hparams").is_dir()))
OVERRIDES = {"output_folder": "results/notebook-posteriors", "number_of_epochs": 10}
CLIP = 2  # its row in the validation set

# %% [markdown]
# ## Training
#
# This does all that `train.py` does. If you interrupt it and run it again, it goes on from the last
# checkpoint. The model first learns to write only blanks, then tokens.

# %%
# With this warm-up, the rate rises as in long runs.
run = Run("hparams/ctc.yaml", {"warmup_fraction": 0.5, **OVERRIDES})
run.train()
epochs = run.history
_, axis = pyplot.subplots(figsize=(8, 3), layout="constrained")
for key, label in {"blank_frames": "blank frames", "CER": "character error rate"}.items():
    axis.plot([e["epoch"] for e in epochs], [100 * e[key] for e in epochs], label=label)
axis.set(title="Validation set by epoch", xlabel="epoch", ylabel="%", ylim=(0, 105))
axis.legend()
pyplot.show()

# %% [markdown]
# ## Posteriors
#
# The model gives each token a probability in each frame of 40 ms. Greedy decoding takes the highest
# line of each frame. The gray line is the blank.

# %%
row = next(iter(run.make_loaders().valid.values())).dataset[CLIP]
clip, rate = row["audio"], run.knobs["sample_rate"]
with Transcriber.load(run.folder / "bundle", decoder="greedy") as recognizer:
    ((segment, encoded),) = recognizer.encode(clip, rate)
    print(f"reference  {row['text']}\ngreedy     {recognizer.transcribe(clip, rate).text}")
    tokenizer, step = recognizer.tokenizer, recognizer.frame_seconds
best, blank = encoded.log_probs.argmax(1), tokenizer.vocabulary.blank  # (U,)
print(f"blank      {np.mean(best == blank):.0%} of the frames")
seconds = step * (np.arange(len(best)) + 0.5)
_, axis = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
for token in {*best.tolist()}:
    share = np.exp(encoded.log_probs[:, token])
    axis.plot(seconds, share, color="0.6" if token == blank else None, linewidth=1)
    for frame in np.flatnonzero((best == token) & (best != blank)):
        axis.text(seconds[frame], share[frame], tokenizer.piece(token), ha="center")
axis.set(title="Posteriors", xlabel="seconds", ylabel="probability", ylim=(0, 1.1))
pyplot.show()

# %% [markdown]
# ## Alignment
#
# The aligner finds the best path of the reference through the posteriors. It can place words that
# greedy decoding misspells, because it has to find only their times.

# %%
aligner = WordAligner(tokenizer=tokenizer, samples_per_frame=round(step * rate), sample_rate=rate)
tokens = tokenizer.encode(row["text"])
_, axis = pyplot.subplots(figsize=(8, 2.5), layout="constrained")
axis.specgram(clip, Fs=rate, NFFT=512, noverlap=352)
for word in aligner.align(encoded.log_probs, tokens, samples=len(clip)):
    axis.axvline(word.start, color="white", linewidth=1)
    axis.text((word.start + word.end) / 2, 7000, word.text, color="white", ha="center")
axis.set(title="Words of the reference", xlabel="seconds", ylabel="Hz")
pyplot.show()
