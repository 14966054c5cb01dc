"""A recipe as SpeechBrain's users have them; only the Brain under it is a parameter.

It is the pattern of SpeechBrain's own CTC recipes, on a model of 9,000 parameters: data comes as
dynamic items of a csv file, in batches by duration; lengths are relative; the loss is a mean.
"""

from pathlib import Path
from typing import Any

import soundfile
import speechbrain as sb
import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.encoder import CTCTextEncoder
from speechbrain.dataio.sampler import DynamicBatchSampler
from speechbrain.utils.data_pipeline import provides, takes

from tests.runs import rows_of

SPLITS = {"train": "train", "valid": "dev", "test": "test"}
HPARAMS = """
seed: 1986
__set_seed: !apply:torch.manual_seed [!ref <seed>]
output_folder: !PLACEHOLDER
save_folder: !ref <output_folder>/save

number_of_epochs: 3
lr: 0.002
max_grad_norm: 1.0
noprogressbar: True
sorting: random
dynamic_batch_sampler:
    max_batch_length: 6.0
    num_buckets: 3
    shuffle: True
    batch_ordering: random
valid_dataloader_opts:
    batch_size: 3

blank_index: 0
output_neurons: 25

compute_features: !new:speechbrain.lobes.features.Fbank
    n_mels: 40
normalize: !new:speechbrain.processing.features.InputNormalization
    norm_type: global
encoder: !new:speechbrain.lobes.models.CRDNN.CRDNN
    input_size: 40
    activation: !name:torch.nn.LeakyReLU
    dropout: 0.15
    cnn_blocks: 1
    cnn_channels: [4]
    cnn_kernelsize: [3, 3]
    time_pooling: True
    rnn_class: !name:speechbrain.nnet.RNN.GRU
    rnn_layers: 2
    rnn_neurons: 16
    rnn_bidirectional: False
    dnn_blocks: 1
    dnn_neurons: 32
ctc_lin: !new:speechbrain.nnet.linear.Linear
    input_size: 32
    n_neurons: !ref <output_neurons>
log_softmax: !new:speechbrain.nnet.activations.Softmax
    apply_log: True
ctc_cost: !name:speechbrain.nnet.losses.ctc_loss
    blank_index: !ref <blank_index>

modules:
    normalize: !ref <normalize>
    encoder: !ref <encoder>
    ctc_lin: !ref <ctc_lin>
model: !new:torch.nn.ModuleList
    - [!ref <encoder>, !ref <ctc_lin>]

opt_class: !name:torch.optim.Adam
    lr: !ref <lr>
lr_annealing: !new:speechbrain.nnet.schedulers.NoamScheduler
    lr_initial: !ref <lr>
    n_warmup_steps: 20
epoch_counter: !new:speechbrain.utils.epoch_loop.EpochCounter
    limit: !ref <number_of_epochs>
error_rate_computer: !name:speechbrain.utils.metric_stats.ErrorRateStats
checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer
    checkpoints_dir: !ref <save_folder>
    recoverables:
        model: !ref <model>
        normalizer: !ref <normalize>
        noam_scheduler: !ref <lr_annealing>
        counter: !ref <epoch_counter>
"""


def make_asr(base: type[sb.Brain]) -> type[sb.Brain]:
    """Define the recipe over one Brain or the other."""

    class ASR(base):  # type: ignore[misc, valid-type]
        def compute_forward(self, batch: Any, stage: sb.Stage) -> Any:
            batch = batch.to(self.device)
            wavs, wav_lens = batch.sig
            feats = self.hparams.compute_features(wavs)
            feats = self.modules.normalize(feats, wav_lens)
            logits = self.modules.ctc_lin(self.modules.encoder(feats))
            return self.hparams.log_softmax(logits), wav_lens

        def compute_objectives(self, predictions: Any, batch: Any, stage: sb.Stage) -> Any:
            p_ctc, wav_lens = predictions
            tokens, tokens_lens = batch.tokens
            loss = self.hparams.ctc_cost(p_ctc, tokens, wav_lens, tokens_lens)
            if stage != sb.Stage.TRAIN:
                sequences = sb.decoders.ctc_greedy_decode(
                    p_ctc, wav_lens, blank_id=self.hparams.blank_index
                )
                decoded = self.label_encoder.decode_ndim(sequences)
                words = ["".join(tokens).split() for tokens in decoded]
                self.wer_metric.append(batch.id, words, [text.split() for text in batch.words])
            return loss

        def on_stage_start(self, stage: sb.Stage, epoch: int | None = None) -> None:
            if stage != sb.Stage.TRAIN:
                self.wer_metric = self.hparams.error_rate_computer()

        def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: bool) -> None:
            if should_step:
                self.hparams.lr_annealing(self.optimizer)

        def on_stage_end(
            self, stage: sb.Stage, stage_loss: float, epoch: int | None = None
        ) -> None:
            if stage == sb.Stage.VALID:
                wer = self.wer_metric.summarize("error_rate")
                self.checkpointer.save_and_keep_only(
                    meta={"WER": wer, "epoch": epoch}, min_keys=["WER"]
                )

    return ASR


def load_recipe(release: Path, output: Path, **overrides: Any) -> dict[str, Any]:
    """Read the hyperparameters, for the data of a release."""
    output.mkdir(parents=True, exist_ok=True)
    hparams: dict[str, Any] = load_hyperpyyaml(HPARAMS, {"output_folder": str(output), **overrides})
    return {**hparams, "release": release}


def list_clips(release: Path, name: str) -> dict[str, dict[str, Any]]:
    """List a split as SpeechBrain's preparations do."""
    clips = {}
    for row in rows_of(release / f"{name}.tsv"):
        clip = release / "clips" / row["path"]
        words = "".join(
            letter for letter in row["sentence"].lower() if letter.isalpha() or letter == " "
        )
        clips[clip.stem] = {"duration": soundfile.info(clip).duration, "wav": clip, "words": words}
    return clips


def dataio_prepare(hparams: dict[str, Any]) -> tuple[dict[str, DynamicItemDataset], CTCTextEncoder]:
    """Make the datasets of dynamic items, and the encoder of their characters."""
    label_encoder = CTCTextEncoder()
    label_encoder.expect_len(hparams["output_neurons"])

    @takes("wav")
    @provides("sig")
    def audio_pipeline(wav: Path) -> torch.Tensor:
        return torch.from_numpy(soundfile.read(wav, dtype="float32")[0])

    @takes("words")
    @provides("char_list", "tokens")
    def text_pipeline(words: str) -> Any:
        yield list(words)
        yield torch.LongTensor(label_encoder.encode_sequence(list(words)))

    data = {
        split: DynamicItemDataset(
            list_clips(hparams["release"], name),
            dynamic_items=[audio_pipeline, text_pipeline],
            output_keys=["id", "sig", "words", "char_list", "tokens"],
        )
        for split, name in SPLITS.items()
    }
    label_encoder.load_or_create(
        path=Path(hparams["output_folder"]) / "label_encoder.txt",
        from_didatasets=list(data.values()),
        output_key="char_list",
        special_labels={"blank_label": hparams["blank_index"]},
        sequence_input=True,
    )
    return data, label_encoder


def run(
    asr: type[sb.Brain], hparams: dict[str, Any], run_opts: dict[str, Any], **fit: Any
) -> sb.Brain:
    """Train and evaluate, as the end of a SpeechBrain `train.py` does.

    ``fit`` overrides what `fit` is given: another data set or loader, other epochs.
    """
    data, label_encoder = dataio_prepare(hparams)
    brain = asr(
        modules=hparams["modules"],
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts={"device": "cpu", **run_opts},
        checkpointer=hparams["checkpointer"],
    )
    brain.label_encoder = label_encoder
    if "train_loader_kwargs" not in fit:
        sampler = DynamicBatchSampler(data["train"], **hparams["dynamic_batch_sampler"])
        brain.train_sampler = sampler
        fit["train_loader_kwargs"] = {"batch_sampler": sampler}
    valid = hparams["valid_dataloader_opts"]
    brain.fit(
        **{"epoch_counter": hparams["epoch_counter"], "train_set": data["train"], **fit},
        valid_set=data["valid"],
        valid_loader_kwargs=valid,
    )
    brain.evaluate(data["test"], min_key="WER", test_loader_kwargs=dict(valid))
    return brain
