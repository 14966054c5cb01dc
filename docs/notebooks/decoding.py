# %% [markdown]
# # Compare decoders
#
# This notebook decodes some clips greedily, with the beam search of a run, with a language model of
# your own text, and with hotwords, and shows what changes. Then it shows which words the model is
# sure of. It needs a trained run. The output here is of `hparams/ctc.yaml`.

# %%
"""Decode clips with several decoders, and show the texts and the confidences of words."""

import os
from dataclasses import replace
from pathlib import Path

from matplotlib import pyplot

from sbkit import Run, load_bundle
from sbkit.evaluate.wer import TextErrors, count_errors
from sbkit.lm.kneser_ney import train
from sbkit.lm.language_models import LanguageModels

# Jupyter starts in the folder of the notebook. All paths start at the root of the checkout.
os.chdir(next(f for f in (Path.cwd(), *Path.cwd().parents) if (f / "hparams").is_dir()))
RUN = "results/ctc/en/3407"
NUM_CLIPS = 8
HOTWORDS = ["circuits", "as dialed"]
OWN_TEXT = """the circuits are busy
your call cannot be completed
the number cannot be connected as dialed
no agent is logged in
call forwarding is activated
"""

# %% [markdown]
# The bundle of a run has its model and its decoder. The clips are the first of its test set.

# %%
run = Run.open(RUN)
bundle = load_bundle(run.folder / "bundle")
loaders = run.make_loaders()
((name, test),) = loaders.splits.test.items()
rows = [loaders.test[name].dataset[index] for index in range(min(NUM_CLIPS, len(test)))]
clips = [row["audio"] for row in rows]

# %% [markdown]
# ## Four decoders
#
# Your text replaces the language model of words; that of tokens stays. A hotword is written only if
# the audio supports it. Count the errors, since a change may help one clip and harm another.

# %%
assert bundle.decoder is not None
own_words = train((line.split() for line in OWN_TEXT.splitlines()), order=2).model
own_models = LanguageModels(own_words, bundle.decoder.language_models.tokens)
decoders = {
    "greedy": bundle.with_decoder("greedy"),
    "beam": bundle,
    "own text": replace(bundle, decoder=bundle.decoder.copy_with(language_models=own_models)),
    "hotwords": bundle.with_more_hotwords(HOTWORDS),
}
texts = {name: decoder.transcribe(clips) for name, decoder in decoders.items()}
for number, row in enumerate(rows):
    print(f"\nreference  {row['text']}")
    for name, decoded in texts.items():
        print(f"{name:9}  {decoded[number]}")

print("\nwrong words")
for name, decoded in texts.items():
    pairs = zip(rows, decoded, strict=True)
    errors = sum((count_errors(row["text"], text) for row, text in pairs), TextErrors())
    print(f"{name:9}  {errors.words.errors} of {errors.words.reference_length}")

# %% [markdown]
# ## Confidence
#
# Each word of the beam search has the probability that it is right, in percent. It was fitted to
# the validation set. Words stand where they are said.

# %%
figure, axis = pyplot.subplots(figsize=(9, 4), layout="constrained")
recognitions = bundle.recognize(clips, times=True)
for number, recognition in enumerate(recognitions):
    for word in recognition.words:
        confidence = word.confidence or 0.0
        box = {"facecolor": "C0", "alpha": 0.7 * confidence, "linewidth": 0}
        axis.text(word.start, -number, f"{word.text} {100 * confidence:.0f}", bbox=box, fontsize=9)
axis.set(title="Words with their confidences", xlabel="seconds", yticks=[])
axis.set(xlim=(0, max(part.seconds for part in recognitions)), ylim=(-len(rows), 1))
pyplot.show()
