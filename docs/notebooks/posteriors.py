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
import torch
from matplotlib import pyplot

from sbkit.config import parse_overrides
from sbkit.decoding import GreedyDecoder, WordAligner
from sbkit.logs import log_to_screen, read_log
from sbkit.train import RunSetup

# Jupyter starts in the folder of the notebook. All paths start at the root of the checkout.
os.chdir(next(f for f in (Path.cwd(), *Path.cwd().parents) if (f / "hparams").is_dir()))
OPTIONS = os.environ.get("SBKIT_OPTIONS", "--output_folder=results/notebook-posteriors")
FEW_EPOCHS = {"number_of_epochs": 10, "warmup_fraction": 0.5}  # the rate rises as in long runs
CLIP = 2  # its row in the validation set

# %% [markdown]
# ## Training
#
# This trains as `train.py` does, but tests nothing. If you run it again, it goes on from the last
# checkpoint. The model first learns to write only blanks, then tokens.

# %%
setup = RunSetup(Path("hparams/ctc.yaml"), {**FEW_EPOCHS, **parse_overrides(OPTIONS.split())})
loaders = setup.make_loaders()
brain = setup.make_brain(loaders)
with log_to_screen(to_stderr=True):
    brain.fit(setup.build_hparams()["epoch_counter"], loaders.train, loaders.valid)
epochs = [line for line in read_log(setup.folder / "train_log.jsonl") if line["kind"] == "epoch"]
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
tokenizer, model = setup.build_hparams()["tokenizer"], brain.network
rate, step = setup.knobs["sample_rate"], model.samples_per_frame
row = next(iter(loaders.valid.values())).dataset[CLIP]
audio = torch.from_numpy(row["audio"])
brain.modules.eval()
scores, _ = model.predict(audio[None].to(brain.device), torch.tensor([len(audio)]))
log_probs = scores[0].detach().cpu().numpy()  # (U, V)
best, blank = log_probs.argmax(1), tokenizer.vocabulary.blank
greedy = GreedyDecoder(vocab_size=tokenizer.vocab_size, blank=blank).nbest(log_probs)[0]
print(f"reference  {row['text']}\ngreedy     {tokenizer.decode(greedy.tokens)}")
print(f"blank      {np.mean(best == blank):.0%} of the frames")
seconds = step / rate * (np.arange(len(best)) + 0.5)
_, axis = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
for token in {*best.tolist()}:
    share = np.exp(log_probs[:, token])
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
aligner = WordAligner(tokenizer=tokenizer, samples_per_frame=step, sample_rate=rate)
_, axis = pyplot.subplots(figsize=(8, 2.5), layout="constrained")
axis.specgram(audio.numpy(), Fs=rate, NFFT=512, noverlap=352)
for word in aligner.align(log_probs, tokenizer.encode(row["text"]), samples=len(audio)):
    axis.axvline(word.start, color="white", linewidth=1)
    axis.text((word.start + word.end) / 2, 7000, word.text, color="white", ha="center")
axis.set(title="Words of the reference", xlabel="seconds", ylabel="Hz")
pyplot.show()
